"""Zoos of arrays: networks of any kind as rows of numbers, from the array to the prediction."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.errors import RunError
from transformer_nfn.prediction.api import RunFolder, train
from transformer_nfn.zoo import StoreError, Zoo, ZooError
from transformer_nfn.zoo.store import arrays as store
from transformer_nfn.zoo.store.folder import Checksums

Layout = dict[str, tuple[int, ...]]
LAYOUT: Layout = {"conv": (3, 4), "bias": (3,), "scale": ()}
"""Sixteen numbers."""


@pytest.fixture
def source() -> np.random.Generator:
    """Random numbers; a test that fails shows their seed."""
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def drawn(source: np.random.Generator) -> Layout:
    """One to five tensors of zero to three axes."""
    axes = source.integers(0, 4, size=source.integers(1, 6)).tolist()
    return {f"layer.{i}": tuple(source.integers(1, 6, n).tolist()) for i, n in enumerate(axes)}


def tensors_of(row: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """The tensors of a row, cut out one after another."""
    tensors, start = {}, 0
    for name, shape in layout.items():
        end = start + math.prod(shape)
        tensors[name] = row[start:end].reshape(shape)
        start = end
    return tensors


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("shard_bytes", [100, 1 << 28])
def test_weights_come_back_bit_by_bit(
    source: np.random.Generator,
    dtype: Any,
    shard_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", shard_bytes)
    layout, count = drawn(source), int(source.integers(1, 40))
    width = sum(map(math.prod, layout.values()))
    kind = np.uint16 if dtype is np.float16 else np.uint32
    W = source.integers(0, np.iinfo(kind).max, (count, width), dtype=kind).view(dtype)
    W[~np.isfinite(W)] = -0.0
    Zoo.from_arrays(tmp_path / "zoo", W, layout)
    zoo = Zoo.open(tmp_path / "zoo")
    in_a_shard = max(1, shard_bytes // W[0].nbytes)
    assert len([*(zoo.path / "shards").iterdir()]) == -(-count // in_a_shard)
    rows = source.integers(0, count, 12)
    for name, stored in zoo.weights(rows).items():
        expected = np.stack([tensors_of(W[row], layout)[name] for row in rows])
        assert stored.numpy().dtype == dtype
        assert stored.numpy().tobytes() == expected.tobytes(), name
    assert (zoo.kind, zoo.named, zoo.finished, zoo.verify()) == ("arrays", True, True, [])
    assert zoo.layout is not None
    assert dict(zoo.layout.shapes) == layout
    assert zoo.table["network"].tolist() == [f"{i:05d}" for i in range(count)]
    batch = zoo.batch(rows)
    assert np.array_equal(batch.weights.numpy(), W[rows].astype(np.float32))


def test_other_numbers_become_float32(source: np.random.Generator, tmp_path: Path) -> None:
    W = source.normal(size=(5, 16))
    trained = nn.Parameter(torch.from_numpy(W))
    for name, weights in (("array", W), ("tensor", trained), ("half", trained.bfloat16())):
        zoo = Zoo.from_arrays(tmp_path / name, weights, LAYOUT)
        expected = torch.as_tensor(weights).detach().float().numpy()
        assert np.array_equal(zoo.batch(range(5)).weights.numpy(), expected)
    with pytest.raises(ZooError, match=r"weights expected floating-point numbers, found torch.int"):
        Zoo.from_arrays(tmp_path / "whole", np.ones((5, 16), dtype=int), LAYOUT)


@pytest.fixture
def arrays(source: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    """Forty networks in shards of ten; targets are known for 38 and 37 of them."""
    monkeypatch.setattr(store, "SHARD_BYTES", 10 * 16 * 4)
    strength = np.linspace(1, 9, 40)[source.permutation(40)]
    W = source.normal(size=(40, 16)) * strength[:, None]
    loss, maker = strength.tolist(), ["adam", "sgd"] * 20
    loss[3], loss[17] = None, math.nan
    maker[3] = maker[4] = maker[5] = None
    names = [f"net-{i}" for i in range(40)]
    runs, seed = [f"run-{i // 2}" for i in range(40)], range(40)
    table = {"loss": loss, "optimizer": maker, "network": names, "run": runs, "seed": seed}
    return Zoo.from_arrays(tmp_path / "zoo", W, LAYOUT, table)


def flip(path: Path, at: int) -> None:
    """Flip one bit of the byte ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def test_damage_is_named_with_file_and_row(arrays: Zoo, source: np.random.Generator) -> None:
    row, byte = int(source.integers(40)), int(source.integers(16 * 4))
    file = arrays.path / "shards" / f"0000{row // 10}.safetensors"
    place = file.stat().st_size - (10 - row % 10) * 16 * 4 + byte
    flip(file, place)
    zoo = Zoo.open(arrays.path)
    (problem,) = zoo.verify()
    assert problem == f"{file}: damaged, row {row % 10} does not match its checksum"
    others = np.flatnonzero(np.arange(40) != row)
    assert len(zoo.batch(others)) == 39
    for read in (zoo.batch, zoo.weights, lambda rows: zoo.dataset(rows, "seed")[1]):
        with pytest.raises(StoreError, match=rf"{file.name}: damaged, row {row % 10}"):
            read([(row + 1) % 40, row])
    assert as_json("zoo", "verify", zoo.path, code=1)["problems"] == [problem]
    flip(file, place)
    flip(file, int(source.integers(8, place - 10 * 16 * 4)))
    assert str(file) in " ".join(Zoo.open(arrays.path).verify())
    file.unlink()
    assert f"{file}: missing" in Zoo.open(arrays.path).verify()[0]


def test_a_damaged_index_or_layout_is_named(arrays: Zoo, source: np.random.Generator) -> None:
    for name in ("index.parquet", "zoo.json"):
        file = arrays.path / name
        place = int(source.integers(file.stat().st_size))
        flip(file, place)
        with pytest.raises(StoreError, match=name):
            Zoo.open(arrays.path)
        assert_refused(name, "zoo", "info", arrays.path)
        flip(file, place)
    fields = json.loads((arrays.path / "zoo.json").read_text())
    fields["layout"]["conv"] = [4, 4]
    Checksums(arrays.path).replace("zoo.json", json.dumps(fields).encode())
    zoo = Zoo.open(arrays.path)
    with pytest.raises(StoreError, match=r"00000.safetensors: 'conv' expected \[4, 4\], found \[3"):
        zoo.weights([0])


def test_names_runs_and_targets_choose_rows(arrays: Zoo) -> None:
    assert arrays.select(network="net-7").tolist() == [7]
    assert arrays.select(optimizer="sgd", runs=["run-3", "run-4"]).tolist() == [7, 9]
    assert list(arrays.targets) == ["loss", "optimizer", "run", "seed"]
    parts = arrays.split(seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    runs = [{*arrays.table["run"][part]} for part in parts]
    assert [len(each) for each in runs] == [14, 3, 3]
    assert len(set.union(*runs)) == 20
    listed = as_json("zoo", "rows", arrays.path, "--run", "run-2")
    assert [(row["row"], row["network"]) for row in listed] == [(4, "net-4"), (5, "net-5")]


def test_networks_without_a_target_stay_in_the_zoo(arrays: Zoo) -> None:
    assert len(arrays) == len(Zoo.open(arrays.path)) == 40
    assert np.flatnonzero(np.isnan(arrays.targets["loss"])).tolist() == [3, 17]
    assert np.flatnonzero(arrays.targets["optimizer"] == "").tolist() == [3, 4, 5]
    assert {3, 17}.isdisjoint(arrays.dataset(target="loss").rows.tolist())
    facts = as_json("zoo", "info", arrays.path)
    assert (facts["networks"], facts["weights"]) == (40, 16)
    missing = {name: each.get("missing") for name, each in facts["targets"].items()}
    assert missing == {"loss": 2, "optimizer": 3, "run": None, "seed": None}
    assert "16 weights in 3 tensors each" in printed("zoo", "info", arrays.path)
    arrays.set_targets(arrays.to_pandas().assign(loss=[None, *range(39)]))
    assert len(Zoo.open(arrays.path).dataset(target="loss")) == 39
    assert arrays.verify() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(
    source: np.random.Generator, tmp_path: Path, value: float
) -> None:
    W, out = source.normal(size=(9, 16)), tmp_path / "zoo"
    bad = sorted(source.choice(9, 2, replace=False).tolist())
    W[bad, source.integers(16, size=2)] = value
    table = {"network": [f"net-{i}" for i in range(9)], "loss": range(9)}
    message = rf"'net-{bad[0]}' \(row {bad[0]}\): its weights are not all finite"
    with pytest.raises(ZooError, match=message):
        Zoo.from_arrays(out, W, LAYOUT, table)
    assert not out.exists()
    zoo = Zoo.from_arrays(out, W, LAYOUT, table, skip=True)
    kept = [i for i in range(9) if i not in bad]
    assert zoo.table["network"].tolist() == [f"net-{i}" for i in kept]
    assert zoo.targets["loss"].tolist() == kept
    assert np.array_equal(zoo.batch(range(7)).weights.numpy(), W[kept].astype(np.float32))
    with pytest.raises(ZooError, match="no network has weights that are all finite"):
        Zoo.from_arrays(tmp_path / "none", np.full((2, 16), value), LAYOUT, skip=True)


W = np.ones((4, 16))


@pytest.mark.parametrize(
    ("weights", "layout", "table", "message"),
    [
        (W[:, 1:], LAYOUT, None, r"weights expected \[networks, 16\] .* found \[4, 15\]"),
        (W[0], LAYOUT, None, r"weights expected \[networks, 16\] .* found \[16\]"),
        (W[:0], LAYOUT, None, r"weights expected \[networks, 16\] .* found \[0, 16\]"),
        (W, LAYOUT, {"loss": [1, 2, 3]}, "expected 4 lines, .* found 3 in column 'loss'"),
        (W, LAYOUT, {"loss": [1, 2, 3, "x"]}, r"row 4 \('00003'\), column 'loss': .* found 'x'"),
        (W, LAYOUT, {"loss": [1, 2, 3, math.inf]}, "column 'loss': expected a finite number"),
        (
            W,
            LAYOUT,
            {"loss": [1, 2, 3, [4]]},
            r"column 'loss': expected a finite number, found \[4\]",
        ),
        (W, LAYOUT, {"network": ["a", "b", "a", "c"]}, "'a' stands in row 1 already"),
        (
            W,
            LAYOUT,
            {"network": ["a", "b", "../c", "d"]},
            "row 3, column 'network': .* found '../c'",
        ),
        (W, LAYOUT, {"network": ["a", "b", None, "d"]}, "row 3, column 'network': expected"),
        (W, LAYOUT, {"checksum": [1, 2, 3, 4]}, "'checksum' is one of the zoo's own"),
        (W, {}, None, "a layout expected the names and shapes of tensors, found none"),
        (W, {"conv": (4, -4)}, None, r"found 'conv': \(4, -4\)"),
        (W, {"conv": (4, 0)}, None, r"found 'conv': \(4, 0\)"),
        (W, {"conv": (4.0, 4)}, None, r"found 'conv': \(4.0, 4\)"),
        (W, {"conv": (True, 16)}, None, r"found 'conv': \(True, 16\)"),
        (W, {"conv": 16}, None, "found 'conv': 16"),
        (W, {"conv": "16"}, None, "found 'conv': 16"),
        (W, {"": (16,)}, None, r"found '': \(16,\)"),
        (W, {"a\nb": (16,)}, None, r"found 'a\\nb': \(16,\)"),
        (W, {3: (16,)}, None, r"found '3': \(16,\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, weights: np.ndarray, layout: Any, table: Any, message: str
) -> None:
    with pytest.raises(ZooError, match=message) as refused:
        Zoo.from_arrays(tmp_path / "zoo", weights, layout, table)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "zoo").exists()


def test_a_folder_that_is_not_empty_is_refused(arrays: Zoo, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for out, message in (
        (arrays.path, "zoo"), (arrays.path / "more", "lies in the zoo"),
        (tmp_path / "other", "thesis.tex"),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=message):
            Zoo.from_arrays(out, W, LAYOUT)
    assert Zoo.open(arrays.path).verify() == []


def test_a_loader_with_workers_reads_the_rows(arrays: Zoo) -> None:
    dataset = arrays.dataset(target="loss", dtype=torch.float64)
    loader = DataLoader(dataset, batch_size=7, num_workers=2)
    batches = [*loader]
    rows = np.setdiff1d(np.arange(40), [3, 17])
    loss = torch.cat([values for _, values in batches])
    assert loss.tolist() == arrays.targets["loss"][rows].tolist()
    expected = arrays.weights(rows)
    for name in LAYOUT:
        read = torch.cat([weights[name] for weights, _ in batches])
        assert read.dtype == torch.float64
        assert torch.equal(read, expected[name].double())
    with pytest.raises(ZooError, match=r"'optimizer' of .* is text: expected a column of numbers"):
        arrays.dataset(target="optimizer")


class Norms(nn.Module):
    """A linear map of the norms of all tensors."""

    reads = "tensors"

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.head = nn.Linear(len(layout), 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        norms = [w.reshape(len(w), -1).norm(dim=1).log1p() for w in batch.values()]
        return self.head(torch.stack(norms, 1)).squeeze(1)


def check_run(run: RunFolder, arrays: Zoo, folder: Path) -> None:
    """Predictions of rows and of files are equal; other tensors are refused by name."""
    assert run.record.zoo["layout"] == {name: list(shape) for name, shape in LAYOUT.items()}
    assert run.record.selection["missing"] == 2
    parts = [run.record.selection[part] for part in ("train", "val", "test")]
    assert sum(parts) == 38
    assert run.evaluate(arrays.path)["networks"] == 38
    rows = run.predict([f"{arrays.path}#3", f"{arrays.path}#8"])  # also without a target
    for row, predicted in zip((3, 8), rows, strict=True):
        tensors = {name: w[0] for name, w in arrays.weights([row]).items()}
        save_file(tensors, file := folder / f"{row}.safetensors")
        (of_file,) = run.predict(file)
        for fact in ("value", "low", "high", "novelty"):
            expected = getattr(predicted, fact)
            assert getattr(of_file, fact) == pytest.approx(expected, rel=1e-4, abs=1e-4), fact
    changes: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
        "shape": (lambda t: t.update(conv=torch.ones(4, 3)),
                  r"tensor 'conv' expected \[3, 4\] .* found \[4, 3\]"),
        "lack": (lambda t: t.pop("scale"), r"tensor 'scale' expected \[\] .* found none"),
        "more": (lambda t: t.update(head=torch.ones(2)), "holds a tensor 'head', which the train"),
        "nan": (lambda t: t.update(bias=torch.full((3,), math.nan)), "'bias'.*(NaN|finite)"),
    }  # fmt: skip
    for name, (change, message) in changes.items():
        other = dict(tensors)
        change(other)
        save_file(other, file := folder / f"{name}.safetensors")
        with pytest.raises(RunError, match=f"{name}.safetensors.*{message}"):
            run.predict(file)


def test_a_class_of_a_user_learns_from_arrays(arrays: Zoo, tmp_path: Path) -> None:
    run = train(arrays, Norms, target="loss", seeds=1, epochs=150, lr=0.1, out=tmp_path / "run")
    check_run(run, arrays, tmp_path)
    assert run.evaluate(arrays.path)["tau"] > 0.3, "norms grow with the target"
    order = ["scale", "bias", "conv"]
    tensors = arrays.weights(range(40))
    W = torch.cat([tensors[name].reshape(40, -1) for name in order], 1)
    turned = Zoo.from_arrays(tmp_path / "turned", W, {name: LAYOUT[name] for name in order},
                             {"loss": arrays.targets["loss"]})  # fmt: skip
    measured = [run.evaluate(zoo.path)["tau"] for zoo in (turned, arrays)]
    assert measured[0] == pytest.approx(measured[1], abs=1e-3)
    there, here = (run.predict(f"{zoo.path}#8")[0].value for zoo in (turned, arrays))
    assert there == pytest.approx(here, rel=1e-4), "tensors are found by name"
    wider = Zoo.from_arrays(tmp_path / "wider", np.ones((3, 17)), {**LAYOUT, "scale": (2,)},
                            {"loss": range(3)})  # fmt: skip
    with pytest.raises(RunError, match=r"wider': tensor 'scale' expected \[\] .* found \[2\]"):
        run.evaluate(wider.path)


def test_statistics_are_learned_from_arrays_by_commands(arrays: Zoo, tmp_path: Path) -> None:
    words = ("--target", "loss", "--model", "statistics_mlp", "--seeds", 1, "--epochs", 30)
    record = as_json("train", arrays.path, *words, "--out", tmp_path / "run")
    assert record["selection"]["missing"] == 2
    (row,) = as_json("predict", tmp_path / "run", f"{arrays.path}#8")
    assert row["recorded"]["network"] == "net-8"
    assert row["low"] <= row["value"] <= row["high"]
    measured = as_json("evaluate", tmp_path / "run", arrays.path)
    assert measured["networks"] == 38
    assert measured["tau"] > 0.3, "statistics grow with the target"
    refused = "does not read arrays of one layout: train"
    for model in ("whole_network", "transformer_nfn", "invariant_mlp"):
        out = ("--model", model, "--out", tmp_path / "other")
        assert_refused(refused, "train", arrays.path, "--target", "loss", *out)
    assert_refused("the predictor reads arrays", "evaluate", tmp_path / "run", "mnist-sample")
    assert_refused("state no architecture", "inspect", f"{arrays.path}#1")


def test_classes_are_learned_where_they_are_known(arrays: Zoo, tmp_path: Path) -> None:
    words = {"target": "optimizer", "seeds": 1, "epochs": 2}
    run = train(arrays, "statistics_linear", out=tmp_path / "run", **words)
    assert run.record.selection["missing"] == 3
    assert {*run.predict(f"{arrays.path}#0")[0].labels} <= {"adam", "sgd"}


def test_a_zoo_of_arrays_moves_with_its_folder(arrays: Zoo, tmp_path: Path) -> None:
    expected = arrays.batch(range(40)).weights
    shutil.move(arrays.path, tmp_path / "moved")
    assert torch.equal(Zoo.open(tmp_path / "moved").batch(range(40)).weights, expected)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_files_of_arrays_are_imported(
    source: np.random.Generator, tmp_path: Path, suffix: str
) -> None:
    """One array of rows with a layout, or an array for each tensor, and a table with a gap."""
    layout, out = {**drawn(source), "last": ()}, tmp_path / "zoo"
    W = source.normal(size=(6, sum(map(math.prod, layout.values())))).astype(np.float32)
    cut = [tensors_of(row, layout) for row in W]
    named = {name: np.stack([tensors[name] for tensors in cut]) for name in layout}
    file, sheet = tmp_path / f"nets{suffix}", tmp_path / "losses.csv"
    sheet.write_text("file,loss,kind\n" + "".join(f"n{i},{i}.5,a\n" for i in range(5)) + "n5,,\n")
    words: list[object] = ["zoo", "import", file, "--targets", sheet, "--out", out]
    if suffix == ".npy":
        np.save(file, W)
        (tmp_path / "layout.json").write_text(json.dumps(layout))
        words += ["--layout", tmp_path / "layout.json"]
    elif suffix == ".npz":
        np.savez(file, **named)
    else:
        save_file({name: torch.from_numpy(w) for name, w in named.items()}, file)
    assert "6 networks" in printed(*words)
    zoo = Zoo.open(out)
    read = zoo.weights(range(6))
    assert {*read} == {*layout}
    assert all(w.numpy().tobytes() == named[name].tobytes() for name, w in read.items())
    assert zoo.table["network"].tolist() == [f"n{i}" for i in range(6)]
    assert np.array_equal(zoo.targets["loss"], [0.5, 1.5, 2.5, 3.5, 4.5, np.nan], equal_nan=True)
    assert zoo.targets["kind"].tolist() == ["a"] * 5 + [""]
    printed("zoo", "export", out, "--out", tmp_path / "files")
    (arrays,) = (tmp_path / "files").glob("*.safetensors")
    more = ("--targets", tmp_path / "files" / "targets.csv", "--out", tmp_path / "again")
    printed("zoo", "import", arrays, *more)
    again = Zoo.open(tmp_path / "again")
    assert all(torch.equal(w, read[name]) for name, w in again.weights(range(6)).items())
    assert again.to_pandas()[["network", "loss", "kind"]].equals(
        zoo.to_pandas()[["network", "loss", "kind"]]
    )


def test_files_that_are_no_arrays_of_networks_are_refused(tmp_path: Path) -> None:
    file, layout, table = tmp_path / "x.npy", tmp_path / "layout.json", tmp_path / "t.csv"
    np.save(file, W)
    np.savez(tmp_path / "odd.npz", a=np.ones((4, 2)), b=np.ones(3), c=np.ones(4))
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    np.save(tmp_path / "texts.npy", np.array(["a", "b"]))
    layout.write_text('{"conv": [3, 4], "bias": [4]}')
    table.write_text("loss\n1\n2\n3\n")
    (tmp_path / "twice.json").write_text('{"conv": [8], "conv": [8]}')
    (tmp_path / "cut.npy").write_bytes(file.read_bytes()[:-8])
    (tmp_path / "bytes.safetensors").write_bytes(b"?" * 40)
    for name, words, message in (
        ("x.npy", (), "'{}/x.npy' holds one array: name a JSON file"),
        ("x.npy", ("--layout", layout, "--targets", table), "'{}/t.csv' expected 4 lines"),
        ("x.npy", ("--layout", tmp_path / "twice.json"), "'conv' stands in it twice"),
        ("x.npy", ("--layout", tmp_path / "gone.json"), "gone.json"),
        ("x.npy", ("--layout", layout, "--dry-run"), "are for checkpoints"),
        ("odd.npz", (), "found 3 in 'b' and 4 in others"),
        ("objects.npy", ("--layout", layout), "objects.npy' cannot be read as arrays of numbers"),
        ("texts.npy", ("--layout", layout), "texts.npy' cannot be read as arrays of numbers"),
        ("cut.npy", ("--layout", layout), "cut.npy' cannot be read as arrays of numbers"),
        ("bytes.safetensors", (), "bytes.safetensors"),
    ):  # fmt: skip
        out = ("--out", tmp_path / "zoo")
        assert_refused(message.format(tmp_path), "zoo", "import", tmp_path / name, *words, *out)
        assert not (tmp_path / "zoo").exists()
