"""A zoo on disk: what is read is what was written, and damage is never silent."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_nfn.zoo import Settings, StoreError, Zoo, ZooError, build, load_task, train
from transformer_nfn.zoo.store import Folder
from transformer_nfn.zoo.training.plan import Plan
from transformer_nfn.zoo.verify import verify

from .conftest import SMALL


@pytest.fixture
def copy(small_zoo: Zoo, tmp_path: Path) -> Path:
    """A zoo a test may damage."""
    return Path(shutil.copytree(small_zoo.path, tmp_path / "zoo"))


def flip(path: Path, at: int) -> None:
    """Flips one bit of the byte ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def test_a_zoo_has_a_row_a_checkpoint(small_zoo: Zoo) -> None:
    assert small_zoo.finished
    assert len(small_zoo) == 12 * 3  # epochs 1 and 2, and the best
    assert len(set(small_zoo.table["run"])) == 12
    assert set(small_zoo.table["epoch"][~small_zoo.table["best"]]) == {1, 2}


def test_weights_are_what_was_trained(small_zoo: Zoo) -> None:
    plan = Plan(Folder.open(small_zoo.path))
    configs = plan.configs()["00001"]
    trained = train(load_task("digits"), configs, plan.recipe)
    rows = np.flatnonzero(small_zoo.table["shard"] == "00001")
    named = small_zoo.weights(rows)
    small_zoo.space.check(named, lead=1)
    assert torch.equal(small_zoo.arch.from_named(named), trained.weights)
    recorded = [r["test_accuracy"] for r in trained.rows]
    assert small_zoo.table["test_accuracy"][rows].tolist() == recorded


def test_rows_come_in_the_order_asked(small_zoo: Zoo) -> None:
    rows = [30, 2, 17, 2]
    together = small_zoo.weights(rows)
    for i, row in enumerate(rows):
        alone = small_zoo.weights([row])
        assert all(torch.equal(together[k][i], alone[k][0]) for k in alone)
    assert small_zoo.weights([])["blocks.0.W_Q"].shape == (0, 2, 32, 16)


def test_select_understands_epochs_best_and_accuracy(small_zoo: Zoo) -> None:
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


def test_splits_keep_runs_whole(small_zoo: Zoo) -> None:
    parts = small_zoo.split(seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(36))
    runs = [set(small_zoo.table["run"][p]) for p in parts]
    assert len(runs[0] | runs[1] | runs[2]) == sum(len(r) for r in runs)
    assert [len(r) for r in runs] == [8, 2, 2]
    again = small_zoo.split(seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    with pytest.raises(ZooError, match="add up to 1"):
        small_zoo.split(fractions=(0.5, 0.2))


def test_parts_fit_the_models(small_zoo: Zoo) -> None:
    batch = small_zoo.batch([0, 1, 2])
    assert len(batch["blocks"]) == 2
    for block in batch["blocks"]:
        small_zoo.block_space.check(block)
        assert block["W_Q"].shape[:2] == (3, 1)
    assert set(batch["embedding"]) == {"W", "b"}
    assert batch["classifier"]["W_2"].shape == (3, 32, 10)


def test_networks_run_and_do_what_the_index_says(small_zoo: Zoo) -> None:
    verdict = verify(small_zoo.path, sample=6)
    assert verdict.ok, verdict.problems
    assert (verdict.networks, verdict.rerun) == (36, 6)


def record_more(zoo: Path, accuracy: float) -> None:
    """Records a higher test accuracy for every network."""
    from transformer_nfn.zoo.store.folder import Checksums
    from transformer_nfn.zoo.store.index import Index

    index = Folder.open(zoo).index()
    index.columns["test_accuracy"] = index.columns["test_accuracy"] + accuracy
    Checksums(zoo).replace("index.parquet", Index(index.columns, index.shards).to_parquet())


def test_verify_notices_a_wrong_record(copy: Path) -> None:
    record_more(copy, 0.2)
    verdict = verify(copy, sample=36)
    assert len(verdict.problems) == 36
    assert "recorded test accuracy" in verdict.problems[0]


def test_what_was_built_here_may_differ_by_two_samples_only(copy: Path) -> None:
    record_more(copy, 2 / 400)
    verdict = verify(copy, sample=4)
    assert verdict.ok, verdict.problems
    assert (verdict.tolerance, verdict.worst_samples, verdict.test_samples) == (2, 2, 400)
    assert not verify(copy, sample=4, tolerance=1).ok
    record_more(copy, 1 / 400)
    strict = verify(copy, sample=4)
    assert len(strict.problems) == 4
    assert strict.problems[0].endswith("3 samples apart")
    assert verify(copy, sample=4, tolerance=3).ok


def test_a_tolerance_below_none_is_refused(small_zoo: Zoo) -> None:
    with pytest.raises(ZooError, match="tolerance must be at least 0 test samples, found -1"):
        verify(small_zoo.path, tolerance=-1)
    assert verify(small_zoo.path, sample=2, tolerance=0).ok


def test_half_precision_records_what_the_stored_weights_do(tmp_path: Path) -> None:
    settings = Settings("digits", runs=2, epochs=1, batch=128, dtype="float16")
    zoo = build(tmp_path / "zoo", settings, workers=1)
    assert zoo.weights([0])["blocks.0.W_Q"].dtype == torch.float16
    assert verify(zoo.path, sample=4).ok


@pytest.mark.parametrize("where", [0, 3, 20, 500, 4000, 0.3, 0.6, 0.9, -1])
def test_a_flipped_bit_in_a_shard_is_named_and_refused(copy: Path, where: float) -> None:
    path = copy / "shards" / "00001.safetensors"
    size = path.stat().st_size
    flip(path, int(size * where) if isinstance(where, float) else where)
    verdict = verify(copy, sample=0)
    assert not verdict.ok
    assert any("00001.safetensors" in problem for problem in verdict.problems)
    assert all("00000" not in problem for problem in verdict.problems)
    zoo = Zoo.open(copy)
    with pytest.raises(StoreError, match=r"00001\.safetensors"):
        zoo.weights(np.flatnonzero(zoo.table["shard"] == "00001"))
    zoo.weights(np.flatnonzero(zoo.table["shard"] == "00000"))


@pytest.mark.parametrize("where", [0.0, 0.2, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("name", ["index.parquet", "zoo.json"])
def test_a_flipped_bit_in_the_index_is_named_and_refused(
    copy: Path, name: str, where: float
) -> None:
    flip(copy / name, int((copy / name).stat().st_size * where))
    verdict = verify(copy, sample=0)
    assert not verdict.ok
    assert name in verdict.problems[0]
    with pytest.raises(StoreError, match=name):
        Zoo.open(copy)


def test_a_shard_cut_short_or_missing_is_named(copy: Path) -> None:
    path = copy / "shards" / "00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "00002" in verify(copy, sample=0).problems[0]
    path.unlink()
    assert "missing" in verify(copy, sample=0).problems[0]


def test_a_newer_format_is_refused(copy: Path) -> None:
    from transformer_nfn.zoo.store.folder import Checksums

    about = json.loads((copy / "zoo.json").read_text())
    Checksums(copy).replace("zoo.json", json.dumps(about | {"format": 99}).encode())
    with pytest.raises(StoreError, match="format 99 is newer"):
        Zoo.open(copy)


def test_what_is_no_zoo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a zoo"):
        Zoo.open(tmp_path)


def test_rows_out_of_range_are_refused(small_zoo: Zoo) -> None:
    for row in (-1, 36):
        with pytest.raises(ZooError, match=f"row {row} asked"):
            small_zoo.weights([row])


def test_a_full_disk_leaves_no_half_written_shard(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Files of this process may grow to 300 kB only, as on a disk with so much left."""
    out = tmp_path / "zoo"
    code = (
        "import sys; from tests.zoo.conftest import SMALL; from transformer_nfn.zoo import build\n"
        "from transformer_nfn.errors import TransformerNFNError\n"
        "try: build(sys.argv[1], SMALL, workers=1)\n"
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
    # With room again the same command finishes the zoo.
    assert build(out, SMALL, workers=1).finished
