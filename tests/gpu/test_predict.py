"""Prediction on a GPU: the values of the CPU, whatever the batch."""

import pytest

from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.predict import predict

pytestmark = pytest.mark.gpu
SAMPLES = {
    "mnist-whole": "mnist-sample",
    "mnist-nfn": "mnist-sample",
    "mnist-boosting": "mnist-sample",
    "ag-news-boosting": "ag-news-sample",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_gpu_predicts_as_the_cpu(name):
    networks = f"{SAMPLES[name]}#0-11"
    on_cpu = predict(name, networks)
    on_gpu = predict(name, networks, device="cuda", batch=5)
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert (a.name, a.warning is None) == (b.name, b.warning is None)
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), abs=1e-3)
        assert a.novelty == pytest.approx(b.novelty, abs=0.02)


def test_a_gpu_evaluates_as_the_cpu():
    on_cpu, on_gpu = (
        evaluate("mnist-boosting", "mnist-sample", device=device) for device in ("cpu", "cuda")
    )
    assert on_gpu["networks"] == on_cpu["networks"] == 160
    for key in ("tau", "r2", "mae", "coverage"):
        assert on_gpu[key] == pytest.approx(on_cpu[key], abs=0.01)
