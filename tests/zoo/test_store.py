"""A zoo on disk: what is read is what was written, and damage is detected."""

import io
import json
import pickle
import re
import resource
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from tnfn_command import assert_refused
from transformer_nfn.errors import AssetError
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.zoo import StoreError, Zoo, ZooError, build, load_task, train
from transformer_nfn.zoo.store.folder import INDEX, Checksums, Folder
from transformer_nfn.zoo.store.index import Index
from transformer_nfn.zoo.training.local_engine import store_shard, train_shard
from transformer_nfn.zoo.training.plan import Plan, make_plan
from transformer_nfn.zoo.verify import verify

from .conftest import SMALL


@pytest.fixture
def copy(small_zoo: Zoo, tmp_path: Path) -> Path:
    """A zoo a test may damage."""
    return Path(shutil.copytree(small_zoo.path, tmp_path / "zoo"))


def test_weights_are_what_was_trained(small_zoo: Zoo) -> None:
    plan = Plan(Folder.open(small_zoo.path), SMALL)
    trained = train(load_task("digits"), plan.configs()["00001"], plan.recipe)
    rows = np.flatnonzero(small_zoo.table["shard"] == "00001")
    named = small_zoo.weights(rows)
    small_zoo.space.check(named, lead=1)
    assert torch.equal(small_zoo.sizes.from_named(named), trained.weights)
    recorded = [r["test_accuracy"] for r in trained.rows]
    assert small_zoo.table["test_accuracy"][rows].tolist() == recorded
    assert (len(small_zoo), small_zoo.finished) == (12 * 3, True)  # epochs 1 and 2, and the best


def test_rows_come_in_the_requested_order(small_zoo: Zoo) -> None:
    rows = [30, 2, 17, 2]
    together = small_zoo.weights(rows)
    for i, row in enumerate(rows):
        alone = small_zoo.weights([row])
        assert all(torch.equal(together[k][i], alone[k][0]) for k in alone)
    assert small_zoo.weights([])["blocks.0.W_Q"].shape == (0, 2, 32, 16)
    for row in (-1, 36):
        with pytest.raises(ZooError, match=f"row {row} of a zoo with 36 rows"):
            small_zoo.weights([row])


def test_select_by_epoch_best_accuracy_and_run(small_zoo: Zoo) -> None:
    t = small_zoo.table
    assert len(small_zoo.select()) == 36
    assert len(small_zoo.select(epoch=2)) == 12
    assert len(small_zoo.select(percent=100, best=None)) == 12
    assert t["best"][small_zoo.select(best=True)].all()
    some = small_zoo.select(min_accuracy=0.1, optimizer="adam")
    assert (t["test_accuracy"][some] >= 0.1).all()
    assert set(t["optimizer"][some]) <= {"adam"}
    run = t["run"][0]
    assert set(t["run"][small_zoo.select(runs=[run])]) == {run}


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_zoo_of_few_epochs_has_every_checkpoint(epochs: int, tmp_path: Path) -> None:
    options = replace(SMALL, runs=2, epochs=epochs, samples=64, batch=32)
    zoo = build(tmp_path / "zoo", options)
    for percent in (50, 75, 100):
        rows = zoo.select(percent=percent)
        assert set(zoo.table["epoch"][rows].tolist()) == {max(1, -(-epochs * percent // 100))}
        assert (len(rows), zoo.table["best"][rows].any()) == (2, False)
    assert len(zoo.select(percent=33)) == 0


def test_splits_do_not_divide_runs(small_zoo: Zoo) -> None:
    parts = small_zoo.split(seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(36))
    runs = [set(small_zoo.table["run"][p]) for p in parts]
    assert len(runs[0] | runs[1] | runs[2]) == sum(len(r) for r in runs)
    assert [len(r) for r in runs] == [8, 2, 2]
    again = small_zoo.split(seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    with pytest.raises(ZooError, match="add up to 1"):
        small_zoo.split(fractions=(0.5, 0.2))


def test_batches_are_the_input_of_models(small_zoo: Zoo) -> None:
    batch = small_zoo.batch([0, 1, 2])
    assert len(batch.blocks()) == 2
    for block in batch.blocks():
        small_zoo.block_space.check(block)
        assert block["W_Q"].shape[:2] == (3, 1)
    assert set(batch.part("embedding")) == {"W", "b"}
    assert batch.part("classifier")["W_2"].shape == (3, 32, 10)


def test_a_zoo_is_a_dataset(small_zoo: Zoo) -> None:
    dataset = small_zoo.dataset()
    weights, accuracy = dataset[2]
    expected = small_zoo.weights([2])
    assert all(torch.equal(weights[name], w[0]) for name, w in expected.items())
    assert float(accuracy) == pytest.approx(small_zoo.config(2)["test_accuracy"])
    with pytest.raises(IndexError):
        dataset[36]
    accuracies = small_zoo.table["test_accuracy"]
    assert [float(a) for _, a in dataset] == pytest.approx(accuracies.tolist())
    weights, rate = small_zoo.dataset([7, 5], "learning_rate", torch.float64)[1]
    assert weights["classifier.b_2"].dtype == rate.dtype == torch.float64
    assert float(rate) == small_zoo.table["learning_rate"][5]
    with pytest.raises(ZooError, match=r"'optimizer' of .* is text: expected a column of numbers"):
        small_zoo.dataset(target="optimizer")
    with pytest.raises(ZooError, match="has no column 'loss'"):
        small_zoo.dataset(target="loss")
    assert repr(small_zoo).startswith(f"Zoo('{small_zoo.path}', digits, 36 networks of 12 runs")


def test_a_loader_reads_a_zoo(small_zoo: Zoo) -> None:
    rows = small_zoo.select(percent=75)
    loader = DataLoader(small_zoo.dataset(rows), batch_size=5, num_workers=1)
    batches = list(loader)
    accuracies = torch.cat([accuracy for _, accuracy in batches])
    assert accuracies.tolist() == pytest.approx(small_zoo.table["test_accuracy"][rows].tolist())
    assert batches[0][0]["blocks.1.W_A"].shape == (5, 32, 64)
    again = pickle.loads(pickle.dumps(small_zoo))
    name = "blocks.1.W_A"
    assert torch.equal(again.weights([0])[name], small_zoo.weights([0])[name])


def test_a_zoo_opens_by_name_and_by_path(tmp_path: Path) -> None:
    zoo = Zoo.open("mnist-sample")
    assert len(zoo) == len(Zoo.open(str(zoo.path))) == 160
    with pytest.raises(AssetError, match="no zoo of that name; named zoos are"):
        Zoo.open("nowhere")
    with pytest.raises(StoreError, match="not a zoo"):
        Zoo.open(tmp_path)


def record_more(zoo: Path, accuracy: float) -> None:
    """Record a higher test accuracy for every network."""
    index = Folder.open(zoo).index()
    index.columns["test_accuracy"] = index.columns["test_accuracy"] + accuracy
    Checksums(zoo).replace("index.parquet", Index(index.columns, index.shards).to_parquet())


def test_verify_compares_accuracies_with_the_index(copy: Path) -> None:
    verdict = verify(copy, sample=4, tolerance=0)
    assert (verdict.ok, verdict.networks, verdict.rerun) == (True, 36, 4), verdict.problems
    record_more(copy, 2 / 400)
    verdict = verify(copy, sample=4)
    assert verdict.ok, verdict.problems
    assert (verdict.tolerance, verdict.worst_samples, verdict.test_samples) == (2, 2, 400)
    assert not verify(copy, sample=4, tolerance=1).ok
    record_more(copy, 1 / 400)
    strict = verify(copy, sample=4)
    assert len(strict.problems) == 4
    assert "recorded test accuracy" in strict.problems[0]
    assert strict.problems[0].endswith("3 samples apart")
    assert verify(copy, sample=4, tolerance=3).ok
    with pytest.raises(ZooError, match="tolerance must be at least 0 test samples, found -1"):
        verify(copy, tolerance=-1)


def test_half_precision_records_the_accuracy_of_stored_weights(tmp_path: Path) -> None:
    zoo = build(tmp_path / "zoo", replace(SMALL, runs=2, epochs=1, dtype="float16"))
    assert zoo.weights([0])["blocks.0.W_Q"].dtype == torch.float16
    assert verify(zoo.path, sample=4, tolerance=0).ok


def flip(path: Path, at: int) -> None:
    """Flip one bit of the byte ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def test_a_flipped_bit_in_a_shard_is_detected(copy: Path) -> None:
    path = copy / "shards" / "00001.safetensors"
    size = path.stat().st_size
    for where in (0, 3, 20, 500, size // 3, size // 2, -1):
        flip(path, where)
        verdict = verify(copy, sample=0)
        assert not verdict.ok
        assert any("00001.safetensors" in problem for problem in verdict.problems)
        assert all("00000" not in problem for problem in verdict.problems)
        zoo = Zoo.open(copy)
        with pytest.raises(StoreError, match=r"00001\.safetensors"):
            zoo.weights(np.flatnonzero(zoo.table["shard"] == "00001"))
        zoo.weights(np.flatnonzero(zoo.table["shard"] == "00000"))
        flip(path, where)


def test_a_flipped_bit_in_the_index_is_detected(copy: Path) -> None:
    for name in ("index.parquet", "zoo.json"):
        for where in (0.0, 0.2, 0.5, 0.999):
            place = int((copy / name).stat().st_size * where)
            flip(copy / name, place)
            verdict = verify(copy, sample=0)
            assert not verdict.ok
            assert name in verdict.problems[0]
            with pytest.raises(StoreError, match=name):
                Zoo.open(copy)
            flip(copy / name, place)


def test_a_truncated_or_missing_shard_is_reported(copy: Path) -> None:
    path = copy / "shards" / "00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "00002" in verify(copy, sample=0).problems[0]
    path.unlink()
    assert "missing" in verify(copy, sample=0).problems[0]


def lose(zoo: Path, *names: str) -> None:
    for name in names:
        (zoo / name).unlink()


def refused(zoo: Path, message: str) -> None:
    """Reading, verifying and building further name the file and what is wrong with it."""
    assert message in verify(zoo, sample=0).problems[0]
    assert_refused(message, "zoo", "rows", zoo)
    with pytest.raises(StoreError, match=re.escape(message)):
        build(zoo, SMALL)


def test_two_copies_of_a_shard_are_not_twice_the_networks(copy: Path) -> None:
    lose(copy, "index.parquet")
    shutil.copyfile(copy / "shards/00000.safetensors", copy / "shards/00002.safetensors")
    run = min({r for i in (0, 2) for r in json.loads((copy / "zoo.json").read_text())["plan"][i]})
    verb = "holds" if run in json.loads((copy / "zoo.json").read_text())["plan"][0] else "lacks"
    refused(copy, f"00002.safetensors: {verb} run '{run}', unlike 'plan' in zoo.json")


def test_swapped_shards_are_found_before_a_build_goes_on(copy: Path) -> None:
    shards = copy / "shards"
    for old, new in (("00000", "x"), ("00001", "00000"), ("x", "00001")):
        (shards / f"{old}.safetensors").rename(shards / f"{new}.safetensors")
    with pytest.raises(StoreError, match=r"0000[01]\.safetensors: (holds|lacks) run"):
        build(copy, SMALL)
    with pytest.raises(StoreError, match=r"00000\.safetensors: damaged, its header"):
        Zoo.open(copy).weights([0])


def test_a_shard_of_a_zoo_with_other_seeds_is_found(copy: Path, tmp_path: Path) -> None:
    build(tmp_path / "other", replace(SMALL, seeds="one", epochs=1, batch=16, samples=64))
    for lost in ((), ("index.parquet",)):
        lose(copy, *lost)
        shutil.copy(tmp_path / "other/shards/00001.safetensors", copy / "shards")
        problem = verify(copy, sample=0).problems[0]
        assert "00001.safetensors" in problem
        assert ("'seed' of run" if lost else "does not match its checksum") in problem
        with pytest.raises(StoreError, match=r"00001\.safetensors: ('seed' of run|damaged)"):
            build(copy, SMALL)


def test_a_name_that_stands_twice_in_the_index_is_found(copy: Path) -> None:
    data = (copy / "index.parquet").read_bytes()
    table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    shards = table.schema.metadata[b"shards"].replace(b"{", b'{"00000": 1, ')
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"shards": shards}), out)
    Checksums(copy).replace("index.parquet", out.getvalue())
    with pytest.raises(StoreError, match="'00000' stands in it twice"):
        Zoo.open(copy)


def test_an_index_of_other_rows_is_found(copy: Path) -> None:
    index = Folder.open(copy).index()
    for name, value in (("row", 7), ("checksum", 5), ("epoch", 9)):
        columns = {**index.columns, name: index.columns[name].copy()}
        columns[name][4] = value
        Checksums(copy).replace("index.parquet", Index(columns, index.shards).to_parquet())
        (problem,) = verify(copy, sample=0).problems
        assert problem.endswith(f"00000.safetensors: '{name}' of its rows is not that of {INDEX}")
    short = {name: column[:-9] for name, column in index.columns.items()}
    Checksums(copy).replace("index.parquet", Index(short, index.shards).to_parquet())
    assert "00002.safetensors: lacks run" in verify(copy, sample=0).problems[0]
    with pytest.raises(StoreError, match=r"00002\.safetensors: lacks run"):
        Zoo.open(copy)


def test_a_shard_that_was_lost_is_made_again(small_zoo: Zoo, copy: Path) -> None:
    """Also if its training is recorded otherwise, as by another version of PyTorch."""
    lose(copy, "shards/00001.safetensors")
    build(copy, SMALL)
    folder = Folder.open(copy)
    for path in small_zoo.path.rglob("*.*"):
        assert (copy / path.relative_to(small_zoo.path)).read_bytes() == path.read_bytes()
    lose(copy, "shards/00001.safetensors")
    plan = make_plan(copy, SMALL)
    assert not (copy / "index.parquet").exists()
    options = plan.options.resolved()
    trained, made = train_shard(plan.load_task(), plan.configs()["00001"], plan.recipe, options)
    store_shard(folder, "00001", trained, {**made, "torch": "99"})
    assert len(build(copy, SMALL)) == 36
    assert verify(copy, sample=0).ok
    rows = np.arange(36)
    again = Zoo.open(copy).weights(rows)
    assert all(torch.equal(w, again[name]) for name, w in small_zoo.weights(rows).items())


def test_a_damaged_row_in_the_header_of_a_shard_is_one_sentence(copy: Path) -> None:
    """With every checksum right."""
    path = copy / "shards" / "00001.safetensors"
    lose(copy, "index.parquet")
    tensors, metadata = read_tensors(path)
    for name in ("run", "row", "checksum", "learning_rate"):
        for value in ([1], None, "x", 10**30):
            header = json.loads(metadata["index"])
            header["rows"][1][name] = value
            body = json.dumps(header)
            signed = {"index": body, "index_crc32": str(zlib.crc32(body.encode()))}
            write_tensors(path, tensors, signed)
            assert "00001.safetensors" in verify(copy, sample=0).problems[0]


def test_other_metadata_is_rejected(copy: Path) -> None:
    metadata = json.loads((copy / "zoo.json").read_text())
    sizes = {name: size for name, size in metadata["architecture"].items() if name != "blocks"}
    for change, words in (
        ({"format": 99}, "format 99 is newer"),
        ({"architecture": sizes}, r"zoo.json' lacks 'architecture.blocks'"),
    ):
        Checksums(copy).replace("zoo.json", json.dumps(metadata | change).encode())
        with pytest.raises(StoreError, match=words):
            Zoo.open(copy)


@pytest.mark.nightly
def test_a_full_disk_leaves_no_partial_shard(tmp_path: Path, environment: dict[str, str]) -> None:
    """Files of the process are limited to 300 kB, as on a full disk."""
    out = tmp_path / "zoo"
    code = (
        "import sys; from tests.zoo.conftest import SMALL; from transformer_nfn.zoo import build\n"
        "from transformer_nfn.errors import TransformerNFNError\n"
        "try: build(sys.argv[1], SMALL)\n"
        "except TransformerNFNError as e: print(e); sys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "cannot be written" in done.stdout
    assert list((out / "shards").iterdir()) == []
    assert build(out, SMALL).finished  # the same build continues with more space
