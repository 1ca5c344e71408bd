"""Classes of users on a GPU: they train there, and predict there what they predict on the CPU."""

import own_models
import pytest

from transformer_nfn.prediction.api import train
from transformer_nfn.prediction.predict import predict

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("cls", own_models.EVERY)
def test_a_class_of_a_user_trains_and_predicts_on_a_gpu(cls, tmp_path):
    model = f"{own_models.__file__}:{cls.__name__}"
    run = train("mnist-sample", model, out=tmp_path, seeds=2, epochs=2, device=DEVICE)
    made = run.record.made["device"]
    assert (made == "cpu") == (DEVICE == "cpu"), made
    found = {}
    for each in ("cpu", DEVICE):
        found[each] = predict(tmp_path, "mnist-sample#0-11", device=each, batch=5, trust=True)
    for a, b in zip(found[DEVICE], found["cpu"], strict=True):
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), abs=1e-3)
