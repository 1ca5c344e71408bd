"""The authors' files: import and export of their layout, bit for bit."""

import csv
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from literal_network import literal_logits
from transformer_nfn.checkpoints import open_model
from transformer_nfn.errors import CheckpointError
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo import ImportFileError, NetworkSizes, Recipe, StoreError, Zoo, sample
from transformer_nfn.zoo.authors import import_authors
from transformer_nfn.zoo.export import export_zoo
from transformer_nfn.zoo.store import Folder, write_shard
from transformer_nfn.zoo.verify import measure_accuracy, verify

from .conftest import random_images


def their_positions() -> torch.Tensor:
    """The sinusoidal table in single precision, as their code computes it."""
    p = torch.zeros(49, 32)
    where = torch.arange(49).float().unsqueeze(1)
    div = torch.exp(torch.arange(0, 32, 2).float() * (-np.log(10000.0) / 32))
    p[:, 0::2], p[:, 1::2] = torch.sin(where * div), torch.cos(where * div)
    return p


def their_state(name: str, seed: int, classes: int) -> dict[str, torch.Tensor]:
    """A state dict written down from the published key names, not by this library."""
    draw = torch.Generator().manual_seed(seed)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    out: dict[str, torch.Tensor] = {}
    if name == "mnist":
        out["embedding.pos_embedding"] = their_positions()
        out["embedding.conv1.weight"], out["embedding.conv1.bias"] = w(32, 1, 4, 4), w(32)
    for i in range(2):
        for part in ("queries", "keys", "values", "out_projection"):
            out[f"encoder.{i}.attention.{part}.weight"] = w(32, 32)
        out[f"encoder.{i}.fc1.weight"], out[f"encoder.{i}.fc1.bias"] = w(64, 32), w(64)
        out[f"encoder.{i}.fc2.weight"], out[f"encoder.{i}.fc2.bias"] = w(32, 64), w(32)
    out["classifier.fc1.weight"], out["classifier.fc1.bias"] = w(32, 32), w(32)
    out["classifier.fc2.weight"], out["classifier.fc2.bias"] = w(classes, 32), w(classes)
    return out


def write_theirs(
    folder: Path,
    name: str,
    classes: int = 10,
    stray: bool = True,
    seeds: tuple[object, ...] | None = None,
) -> Path:
    """A folder in the authors' layout: five epochs of three runs, metadata, stray keys.

    Args:
        seeds: what the table says of each run; None for a table without such a column.
    """
    (folder / name).mkdir(parents=True)
    (folder / "metadata").mkdir()
    rows = []
    best = "best" if name == "ag_news" else "best1"
    for n in range(3):
        for e, epoch in enumerate(("1", "50", "75", "100", best)):
            accuracy = 0.5 + 0.1 * n + 0.01 * e
            state = their_state(name, 10 * n + e, classes)
            if stray and n == 1:
                state["encoder.0.attention.queries.bias"] = torch.zeros(32)
            file = f"run{n}_{epoch}_{int(accuracy * 10000)}.pt"
            torch.save(state, folder / name / file)
            rows.append(
                ({} if seeds is None else {"seed": seeds[n]})
                | {
                    "run_id": f"run{n}",
                    "optimizer": "Adam",
                    "lr": 0.001,
                    "weight_decay": 1e-6,
                    "init_std": 0.2,
                    "dropout": 0.05,
                    "train_fraction": 0.9,
                    "ckpt_epoch": epoch,
                    "ckpt_file": f"{name}/{file}",
                    "test_top1_accuracy" if name == "mnist" else "test_accuracy": accuracy,
                }
            )
    with (folder / "metadata" / f"{name}.csv").open("w", newline="") as sheet:
        writer = csv.DictWriter(sheet, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def zipped(folder: Path) -> Path:
    out = folder.with_suffix(".zip")
    with zipfile.ZipFile(out, "w") as archive:
        for path in folder.rglob("*"):
            archive.write(path, path.relative_to(folder.parent))
    return out


@pytest.mark.parametrize(
    ("name", "classes", "as_zip"),
    [("mnist", 10, True), ("ag_news", 4, False), ("ag_news", 10, True)],
)
def test_import_and_export_round_trip(
    tmp_path: Path, name: str, classes: int, as_zip: bool
) -> None:
    theirs = write_theirs(tmp_path / "theirs", name, classes)
    zoo, report = import_authors(zipped(theirs) if as_zip else theirs, tmp_path / "zoo")
    assert (len(zoo), zoo.sizes.classes) == (15, classes)
    assert report.stray == {"encoder.0.attention.queries.bias": 5}
    assert len(zoo.select(epoch=75)) == 3
    assert len(zoo.select(best=True)) == 3
    row = int(zoo.select(epoch=75)[2])
    assert zoo.table["test_accuracy"][row] == pytest.approx(0.72)
    assert zoo.table["optimizer"][row] == "adam"
    assert zoo.table["learning_rate"][row] == 0.001
    assert export_zoo(zoo, tmp_path / "out") == 15
    for path in sorted((theirs / name).iterdir()):
        before = torch.load(path, weights_only=True)
        after = torch.load(tmp_path / "out" / name / path.name, weights_only=True)
        before.pop("encoder.0.attention.queries.bias", None)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_source_whose_name_is_not_utf_8_is_spelled(tmp_path: Path) -> None:
    import_authors(write_theirs(tmp_path / os.fsdecode(b"\xff"), "mnist"), tmp_path / "zoo")
    task = Folder.open(tmp_path / "zoo").metadata["task"]
    assert task["provenance"] == {"imported": r"\xff"}


@pytest.mark.parametrize("source", ["{", '{"seed": 1}', '{"file": 3}'])
def test_a_damaged_source_of_a_row_is_refused(source: str, tmp_path: Path) -> None:
    zoo = import_authors(write_theirs(tmp_path / "theirs", "mnist"), tmp_path / "zoo")[0]
    zoo.table["source"][3] = source
    with pytest.raises(StoreError, match="a row of the zoo"):
        export_zoo(zoo, tmp_path / "out")


@pytest.mark.parametrize("half", ["weight", "bias"])
def test_a_file_with_half_an_embedding_is_refused(half: str, tmp_path: Path) -> None:
    state = their_state("mnist", 0, 10)
    del state[f"embedding.conv1.{half}"]
    torch.save(state, tmp_path / "net.pt")
    with pytest.raises(CheckpointError, match=f"lacks 'embedding.conv1.{half}', which holds"):
        open_model(tmp_path / "net.pt")


def test_an_imported_network_computes_what_its_file_says(tmp_path: Path) -> None:
    """Forward written out from the state dict alone."""
    theirs = write_theirs(tmp_path / "theirs", "mnist")
    zoo, _ = import_authors(theirs, tmp_path / "zoo")
    row = int(zoo.select(epoch=50, runs=["run2"])[0])
    s = torch.load(theirs / "mnist" / "run2_50_7100.pt", weights_only=True)
    images = torch.randn(4, 1, 28, 28)
    expected = literal_logits(s, images, s["embedding.pos_embedding"], heads=2)
    with torch.no_grad():
        torch.testing.assert_close(zoo.network(row)(images), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def imported_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Imports files whose recorded accuracy is that many samples too high."""
    task = random_images(28, 4, 255)
    monkeypatch.setattr("transformer_nfn.zoo.verify.load_task", lambda *_, **__: task)
    theirs = write_theirs(tmp_path / "theirs", "mnist")
    plain, _ = import_authors(theirs, tmp_path / "plain")
    names = [json.loads(source)["file"] for source in plain.table["source"]]
    hits = {
        file: round(measure_accuracy(plain, task, row) * task.num_samples["test"])
        for row, file in enumerate(names)
    }

    def with_record(more: int) -> Path:
        sheet = theirs / "metadata" / "mnist.csv"
        rows = list(csv.DictReader(sheet.read_text().splitlines()))
        for row in rows:
            correct = hits[Path(row["ckpt_file"]).name] + more
            row["test_top1_accuracy"] = str(correct / task.num_samples["test"])
        with sheet.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return import_authors(theirs, tmp_path / f"zoo-{more}")[0].path

    return with_record


def test_imported_networks_may_differ_by_rounding_on_other_hardware(
    imported_mnist: Callable[[int], Path],
) -> None:
    for more, valid in ((10, True), (11, False)):
        path = imported_mnist(more)
        verdict = verify(path, sample=5)
        assert verdict.ok is valid, verdict.problems
        assert (verdict.tolerance, verdict.worst_samples, verdict.rerun) == (10, more, 5)
    assert len(verdict.problems) == 5
    assert verdict.problems[0].endswith("11 samples apart")
    assert verify(path, sample=5, tolerance=11).ok


@pytest.mark.parametrize(
    ("seeds", "kind"),
    [
        ((3, 3, "3.0"), "one"),
        ((2**62 + 1, 2**62 + 2, 2**62 + 3), "each"),
        ((3, 3, ""), "unknown"),
    ],
)
def test_an_imported_zoo_has_the_seeds_of_its_table(
    tmp_path: Path, seeds: tuple[object, ...] | None, kind: str
) -> None:
    theirs = write_theirs(tmp_path / "theirs", "mnist", seeds=seeds)
    zoo, _ = import_authors(theirs, tmp_path / "zoo")
    assert (zoo.seeds, Zoo.open(zoo.path).seeds) == (kind, kind)
    export_zoo(zoo, tmp_path / "out")
    again, _ = import_authors(tmp_path / "out", tmp_path / "again")
    assert again.seeds == kind
    assert again.table["seed"].tolist() == zoo.table["seed"].tolist()


@pytest.mark.parametrize("task", ["fashion_mnist", "ag_news"])
def test_an_export_of_any_task_is_imported_unchanged(task: str, tmp_path: Path) -> None:
    """Bit for bit, with its configurations, seeds, accuracies and checkpoints."""
    sizes = NetworkSizes.of(KNOWN_TASKS[task])
    rows = [
        config.to_json()
        | {"epoch": epoch, "percent": percent, "best": best, "crashed": False}
        | {"test_accuracy": 0.1 + 0.01 * i}
        for i, config in enumerate(sample(3, seed=5))
        for epoch, percent, best in ((9, 50, False), (14, 75, False), (14, 0, True))
    ]
    weights = torch.randn(len(rows), sizes.num_weights, generator=torch.Generator().manual_seed(0))
    fields = {
        "origin": "build", "task": {"name": task, "samples": None, "provenance": {}}, "shards": 1,
        "recipe": Recipe(18).to_json(), "seed": 5, "runs": 3, "dtype": "float32",
        "plan": [sorted({row["run"] for row in rows})],
    }  # fmt: skip
    folder = Folder.create(tmp_path / "zoo", sizes, fields)
    stored = sizes.to_rows(weights)
    write_shard(folder.shard_path("00000"), sizes.row_layout, stored, rows, {})
    folder.merge()
    zoo = Zoo.open(tmp_path / "zoo")
    export_zoo(zoo, tmp_path / "out")
    back, _ = import_authors(tmp_path / "out", tmp_path / "back")
    assert (back.sizes, back.seeds, back.metadata["task"]["name"]) == (zoo.sizes, "each", task)
    columns = [[z.table[c].tolist() for c in ("run", "epoch", "best")] for z in (zoo, back)]
    keys = [list(zip(*each, strict=True)) for each in columns]
    order = [keys[1].index((run, 0 if best else epoch, best)) for run, epoch, best in keys[0]]
    first, second = zoo.weights(range(len(zoo))), back.weights(order)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for column in ("percent", "optimizer", "learning_rate", "seed", "test_accuracy"):
        assert back.table[column][order].tolist() == zoo.table[column].tolist(), column
    assert len(back.select(percent=75)) == 3


def rejected(source: Path, out: Path, words: str) -> None:
    with pytest.raises(ImportFileError, match=words):
        import_authors(source, out)
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}*"))


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    theirs = write_theirs(tmp_path / "theirs", "mnist")
    victim = sorted((theirs / "mnist").iterdir())[-1]
    torch.save({"classifier.fc2.bias": Trap()}, victim)
    rejected(theirs, tmp_path / "zoo", "not a plain state dict")
    victim.write_bytes(pickle.dumps(Trap()))
    rejected(theirs, tmp_path / "zoo", "not a plain state dict")
    assert not (tmp_path / "ran").exists()


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "theirs", "mnist")
    victim = theirs / "mnist" / "run1_75_6200.pt"
    good = torch.load(victim, weights_only=True)
    out = tmp_path / "zoo"
    torch.save([1, 2], victim)
    rejected(theirs, out, "run1_75_6200.pt' is not a plain state dict of tensors")
    torch.save({k: v for k, v in good.items() if k != "classifier.fc1.bias"}, victim)
    rejected(theirs, out, "run1_75_6200.pt: state dict lacks 'classifier.fc1.bias'")
    torch.save(good | {"classifier.fc1.bias": torch.zeros(31)}, victim)
    rejected(theirs, out, r"'classifier.fc1.bias': expected shape \[32\], found \[31\]")
    torch.save(good | {"classifier.fc1.bias": torch.full((32,), torch.nan)}, victim)
    rejected(theirs, out, "not finite")
    torch.save(good | {"embedding.pos_embedding": torch.zeros(49, 32)}, victim)
    rejected(theirs, out, "not the fixed sinusoidal table")


def test_a_zip_with_unsafe_paths_is_rejected(tmp_path: Path) -> None:
    source = tmp_path / "evil.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("../evil.pt", b"x")
    rejected(source, tmp_path / "zoo", r"unsafe path '../evil.pt'")
    assert not (tmp_path.parent / "evil.pt").exists()


def test_invalid_sources_are_rejected(tmp_path: Path, small_zoo: Zoo) -> None:
    rejected(tmp_path / "nothing", tmp_path / "zoo", "does not exist")
    (tmp_path / "empty").mkdir()
    rejected(tmp_path / "empty", tmp_path / "zoo", "your own need --targets")
    (tmp_path / "text").write_text("x")
    rejected(tmp_path / "text", tmp_path / "zoo", "neither a folder nor a zip")
    theirs = write_theirs(tmp_path / "theirs", "mnist")
    with pytest.raises(StoreError, match="another zoo"):
        import_authors(theirs, small_zoo.path)
    write_theirs(theirs / "more", "ag_news")
    rejected(theirs, tmp_path / "zoo", "both ag_news and mnist files")


def test_their_positions_are_ours_up_to_rounding() -> None:
    ours = NetworkSizes(49, 10, 16).positions()
    assert (ours - their_positions()).abs().max() < 1e-5
