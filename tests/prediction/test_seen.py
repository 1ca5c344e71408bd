"""What a run keeps of its training networks: small, and as good as what it learned."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformer_nfn.prediction.dataset import load_rows, select_rows
from transformer_nfn.prediction.novelty import SEEN_FILE, Seen
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo import Zoo


@pytest.fixture(scope="module")
def networks():
    zoo = Zoo.open("mnist-sample")
    return load_rows(zoo, select_rows(zoo)[:48])


@pytest.mark.parametrize("any_size", [False, True])
def test_half_precision_moves_no_distance(networks, tmp_path, any_size):
    learned = Seen.of([networks.take(torch.arange(32))], any_size=any_size)
    learned.save(tmp_path)
    assert load_file(tmp_path / SEEN_FILE)["rows"].dtype == torch.float16
    others = networks.take(torch.arange(32, 48))
    kept, exact = Seen.load(tmp_path).novelty(others), learned.novelty(others)
    assert float((kept - exact).abs().max()) < 1e-3
    assert float(exact.min()) > 0.1


def test_a_file_in_single_precision_is_read_as_ever(networks, tmp_path):
    learned = Seen.of([networks])
    learned.save(tmp_path)
    tensors = load_file(tmp_path / SEEN_FILE) | {"rows": learned.rows}
    save_file(tensors, tmp_path / SEEN_FILE)
    assert torch.equal(Seen.load(tmp_path).rows, learned.rows)


def test_rows_of_another_precision_are_refused(networks, tmp_path):
    learned = Seen.of([networks])
    learned.save(tmp_path)
    tensors = load_file(tmp_path / SEEN_FILE) | {"rows": learned.rows.double()}
    save_file(tensors, tmp_path / SEEN_FILE)
    with pytest.raises(RunError, match=r"'rows' expected shape .* in float32, found .* in float64"):
        Seen.load(tmp_path)
