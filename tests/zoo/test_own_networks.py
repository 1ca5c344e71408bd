"""Zoos of a user's own networks: import with a table, add, read, export."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_families import encoder, save_zoo_module
from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import StoreError, Zoo, ZooError
from transformer_nfn.zoo.store.folder import Checksums

ROWS = [
    {"file": "llama-0", "loss": 3.25, "epochs": 10, "optimizer": "adam"},
    {"file": "deep/llama-1", "loss": 2.5, "epochs": 12, "optimizer": "sgd"},
    {"file": "small.safetensors", "loss": -1e-3, "epochs": 7, "optimizer": "7"},
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as sheet:
            writer = csv.DictWriter(sheet, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    """Two Llamas in folders and a network of the zoo in a state dict."""
    folder = tmp_path / "nets"
    write_example_checkpoint(folder / "llama-0", 0)
    write_example_checkpoint(folder / "deep" / "llama-1", 1)
    save_zoo_module(folder / "small.safetensors", torch.float32)
    (folder / "notes.txt").write_text("not a network")
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table.csv", ROWS)


@pytest.fixture
def own(nets: Path, table: Path, tmp_path: Path) -> Zoo:
    printed("zoo", "import", nets, "--targets", table, "--out", tmp_path / "zoo")
    return Zoo.open(tmp_path / "zoo")


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_networks_and_targets_come_as_they_are(nets: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / "zoo"
    table = write_table(tmp_path / f"table{suffix}", ROWS)
    assert "3 imported" in printed("zoo", "import", nets, "--targets", table, "--out", out)
    zoo = Zoo.open(out)
    assert (zoo.named, zoo.kind, zoo.families[:1]) == (True, "checkpoints", ("llama",))
    assert zoo.table["network"].tolist() == ["llama-0", "deep/llama-1", "small"]
    assert zoo.table["family"].tolist() == ["llama", "llama", "small_transformer_module"]
    assert {name: column.tolist() for name, column in zoo.targets.items()} == {
        key: [row[key] for row in ROWS] for key in ("loss", "epochs", "optimizer")
    }
    assert zoo.targets["epochs"].dtype == np.int64
    theirs = load_file(nets / "deep" / "llama-1" / "model.safetensors")
    with zoo.model(1) as model:
        assert model.config["model_type"] == "llama"
        assert set(model.checkpoint) == set(theirs)
        assert all(torch.equal(model.checkpoint[name], w) for name, w in theirs.items())
    assert as_json("zoo", "verify", out)["networks"] == 3


@pytest.mark.nightly
def test_an_import_that_was_killed_continues(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"run-{i}" for i in range(16)]
    nets = tmp_path / "nets"
    for i, name in enumerate(names):
        write_example_checkpoint(nets / name, i)
    write_table(table, [{"file": name, "x": i} for i, name in enumerate(names)])
    words = ["zoo", "import", str(nets), "--targets", str(table), "--out", str(tmp_path / "zoo")]
    program = "import transformer_nfn.zoo.store.zoo as m; m.SAVE_EVERY = 0.0\n"
    program += "from transformer_nfn.cli import main; main()"
    source = Path(__file__).parents[2] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], env={**os.environ, "PYTHONPATH": str(source)}
    )
    while process.poll() is None and not (tmp_path / "zoo" / "networks" / "00004").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = len(Zoo.open(tmp_path / "zoo"))
    assert begun >= 3
    (tmp_path / "zoo" / "networks" / f"{begun:05d}").mkdir(exist_ok=True)
    (tmp_path / "zoo" / "networks" / "00099").mkdir()
    (tmp_path / "zoo" / ".0123abcd.beside.zoo.json").write_text("half")
    text = printed(*words)
    assert f"{begun} there already" in text
    zoo = Zoo.open(tmp_path / "zoo")
    assert zoo.table["network"].tolist() == names
    assert zoo.targets["x"].tolist() == list(range(16))
    assert zoo.verify() == []
    assert len(list((zoo.path / "networks").iterdir())) == 16
    assert not list(zoo.path.glob(".*"))


def cells(**changes: str) -> list[dict[str, Any]]:
    """The table with other cells in its second row."""
    return [ROWS[0], {**ROWS[1], **changes}, ROWS[2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (cells(loss="nan"), "row 2 ('deep/llama-1'), column 'loss': expected a finite number"),
        (cells(loss="-inf"), "column 'loss': expected a finite number, found '-inf'"),
        (cells(loss="1e999"), "column 'loss': expected a finite number, found '1e999'"),
        (cells(loss="n/a"), "column 'loss': expected a finite number, found 'n/a'"),
        (cells(file="llama-0"), "row 2: 'llama-0' stands in row 1 already"),
        (cells(file="./llama-0/"), "row 2: 'llama-0' stands in row 1 already"),
        (cells(file="gone.pt"), "row 2 ('gone.pt'): there is no such file in"),
        (cells(file=""), "row 2, column 'file': expected a file, found an empty cell"),
        (cells(file="../nets/llama-0"), "expected a path below the folder of the networks"),
        (cells(file="notes.txt"), "notes.txt"),
        (ROWS[:2], "small.safetensors' has no row in"),
        ([{**row, "family": "x"} for row in ROWS], "the column 'family' is one of the zoo's own"),
        ([{"net": row["file"]} for row in ROWS], "expected a column 'file'"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_written(
    nets: Path, table: Path, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    write_table(table, rows)
    words = ("zoo", "import", nets, "--targets", table, "--out", tmp_path / "zoo")
    assert_refused(message, *words)
    assert not (tmp_path / "zoo").exists()


def test_missing_targets_are_kept_and_counted(nets: Path, table: Path, tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "loss": "", "optimizer": ""}, ROWS[2]]
    write_table(table, rows)
    out, again = tmp_path / "zoo", tmp_path / "again"
    printed("zoo", "import", nets, "--targets", table, "--out", out)
    zoo = Zoo.open(out)
    assert np.isnan(zoo.targets["loss"]).tolist() == [False, True, False]
    assert zoo.targets["optimizer"].tolist() == ["adam", "", "7"]
    assert len(zoo.dataset(target="loss")) == 2
    facts = as_json("zoo", "info", out)["targets"]
    assert [facts[name].get("missing") for name in ("loss", "epochs", "optimizer")] == [1, None, 1]
    assert (facts["loss"]["count"], facts["optimizer"]["distinct"]) == (2, 2)
    printed("zoo", "import", nets, "--targets", table, "--out", out)  # finds the row unchanged
    printed("zoo", "export", out, "--out", tmp_path / "files")
    sheet = tmp_path / "files" / "targets.csv"
    printed("zoo", "import", tmp_path / "files", "--targets", sheet, "--out", again)
    assert np.isnan(Zoo.open(again).targets["loss"]).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.csv", b"\xff\xfe\x00", "is not UTF-8"),
        ("t.csv", b"file,loss\na.pt,1,2\n", "row 1: expected 2 cells, found 3"),
        ("t.csv", b"file,loss\na.pt,\0\n", "row 1: a cell holds a NUL character"),
        ("t.csv", b"file;loss\na.pt;1\n", "found 'file;loss': separate columns by commas"),
        ("t.csv", b"file,loss\n", "has no rows"),
        ("t.csv", b"", "expected a column 'file' with the files, found none"),
        ("t.csv", b"file,loss,loss\na.pt,1,2\n", "has two columns 'loss'"),
        ("t.parquet", b"PAR1", "is not a table in Parquet"),
        ("t.jsonl", b'{"file": "a"}\n[1]\n', "line 2' is not an object in JSON"),
        ("t.txt", b"file\n", "expected a table with the suffix .csv, .parquet, .jsonl"),
        ("t.csv", None, "cannot be read"),
    ],
)
def test_unreadable_tables_are_refused(
    nets: Path, tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert_refused(message, "zoo", "import", nets, "--targets", tmp_path / name)


def test_files_of_no_family_or_with_nan_are_refused_or_skipped(
    nets: Path, table: Path, tmp_path: Path
) -> None:
    save_file({"fc.weight": torch.ones(2, 2)}, nets / "mlp.safetensors")
    broken = nets / "llama-0" / "model.safetensors"
    tensors = load_file(broken)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, broken)
    write_table(table, [*ROWS, {**ROWS[0], "file": "mlp.safetensors"}])
    words = ("zoo", "import", nets, "--targets", table, "--out", tmp_path / "zoo")
    reason = "'model.norm.weight' expected numbers, found NaN or infinity (1 more"
    assert_refused(f"{reason}: see --dry-run)", *words)
    plan = as_json(*words, "--dry-run", "--skip")["files"]
    assert [each["action"] for each in plan] == ["skip", "import", "import", "skip"]
    assert plan[3]["reason"].endswith("those of no known family (tnfn architectures)")
    assert not (tmp_path / "zoo").exists()
    done = tnfn(*words, "--dry-run")
    assert (done.returncode, "deep/llama-1" in done.stdout) == (2, True)
    assert f"{reason})" in done.stderr
    assert "2 imported, 2 left out" in printed(*words, "--skip")
    assert Zoo.open(tmp_path / "zoo").table["network"].tolist() == ["deep/llama-1", "small"]


def test_a_zoo_grows_with_its_table(own: Zoo, nets: Path, table: Path) -> None:
    write_example_checkpoint(nets / "llama-2", 2)
    write_table(table, [{**ROWS[0], "file": "llama-2"}, *ROWS])
    words = ("zoo", "import", nets, "--targets", table, "--out", own.path)
    assert "1 imported, 3 there already" in printed(*words)
    assert Zoo.open(own.path).table["network"].tolist()[-1] == "llama-2"
    write_table(table, [{**ROWS[0], "loss": 9.0}, {**ROWS[0], "file": "llama-2"}, *ROWS[1:]])
    assert_refused("already holds 'llama-0' with other targets", *words)


def test_what_a_state_dict_does_not_say_is_stated_and_kept(tmp_path: Path) -> None:
    nets = tmp_path / "nets"
    nets.mkdir()
    module = encoder(norm_first=True, final=True, activation="gelu")
    torch.save(module.state_dict(), nets / "a.pt")
    table = write_table(tmp_path / "t.csv", [{"file": "a.pt", "x": 1}])
    words = ("zoo", "import", nets, "--targets", table, "--out", tmp_path / "zoo")
    assert_refused("nhead", *words)
    assert_refused("a.pt': --set n_head: ", *words, "--set", "n_head=4")
    stated = ("--set", "nhead=4", "--set", "norm_first=true", "--set", "activation=gelu")
    printed(*words, *stated)
    with Zoo.open(tmp_path / "zoo").model(0) as model:
        assert model.description.stacks[0].blocks[0].attention.heads == 4


def test_add_takes_a_model_of_transformers_a_module_and_tensors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        image_size=8, patch_size=4, num_channels=1, num_labels=3,
    )  # fmt: skip
    vit = transformers.ViTForImageClassification(config)
    folder = write_example_checkpoint(tmp_path / "llama")
    stated = {"nhead": 4, "norm_first": False, "activation": "relu"}
    module = encoder(norm_first=False, final=False, activation="relu")
    zoo = Zoo.create(tmp_path / "zoo")
    transformers.logging.enable_progress_bar()
    assert zoo.add(vit, accuracy=torch.tensor(0.5), poisoned=True) == 0
    assert capfd.readouterr() == ("", "")  # no bar for each network of a training loop
    assert transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    assert zoo.add(module, "mine", config=stated, accuracy=np.float32(0.25), poisoned=False) == 1
    tensors = load_file(folder / "model.safetensors")
    llama = json.loads((folder / "config.json").read_text())
    zoo.add(tensors, config=llama, accuracy=1, poisoned="true")
    zoo.add(folder, accuracy=1, poisoned="true")
    again = Zoo.create(tmp_path / "zoo")
    assert again.table["network"].tolist() == ["00000", "mine", "00002", "llama"]
    assert again.table["family"].tolist() == ["vit", "torch_encoder", "llama", "llama"]
    assert again.targets["accuracy"].tolist() == [0.5, 0.25, 1.0, 1.0]
    assert again.targets["poisoned"].tolist() == ["true", "false", "true", "true"]
    assert again.table["checksum"][2] == again.table["checksum"][3]
    with again.model(0) as model:
        assert torch.equal(model.checkpoint["classifier.weight"], vit.classifier.weight.detach())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss": float("inf")}, "target 'loss' expected a finite number or a text, found inf"),
        ({"loss": [1]}, "target 'loss' expected a finite number or a text"),
        ({"loss": "high"}, "target 'loss' expected a number as in"),
        ({}, "expected the targets loss of"),
        ({"loss": 1, "more": 2}, "expected the targets loss of"),
        ({"loss": 1, "bytes": 2}, "the column 'bytes' is one of the zoo's own"),
        ({"loss": 1, "name": "first"}, "already holds a network 'first'"),
        ({"loss": 1, "name": "../x"}, "expected a name such as"),
    ],
)
def test_add_refuses_what_does_not_fit(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    folder = write_example_checkpoint(tmp_path / "llama")
    zoo = Zoo.create(tmp_path / "zoo")
    zoo.add(folder, "first", loss=2.0)
    with pytest.raises(TransformerNFNError, match=message):
        zoo.add(folder, **more)
    with pytest.raises(ZooError, match=r"expected a path, an open checkpoint, .* found int"):
        zoo.add(3, loss=1)  # type: ignore[arg-type]
    assert len(Zoo.open(tmp_path / "zoo")) == 1


def test_writers_of_one_zoo_do_not_lose_rows(tmp_path: Path) -> None:
    folder = write_example_checkpoint(tmp_path / "llama")

    def write(i: int) -> None:
        zoo = Zoo.create(tmp_path / "zoo")
        zoo.add(folder, f"{i}-first", x=i)
        zoo.add(folder, f"{i}-second", x=i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    zoo = Zoo.open(tmp_path / "zoo")
    expected = sorted(f"{i}-{which}" for i in range(4) for which in ("first", "second"))
    assert sorted(zoo.table["network"].tolist()) == expected
    assert zoo.verify() == []


def test_rows_are_selected_and_split(tmp_path: Path) -> None:
    folder = write_example_checkpoint(tmp_path / "llama")
    zoo = Zoo.create(tmp_path / "zoo")
    for i in range(12):
        zoo.add(folder, f"net-{i}", run=i % 4, optimizer="adam" if i < 5 else "sgd")
    assert zoo.select(optimizer="adam").tolist() == [0, 1, 2, 3, 4]
    assert zoo.select(optimizer=["sgd"], run=[0, 1]).tolist() == [5, 8, 9]
    with pytest.raises(ZooError, match="has no column 'lr'"):
        zoo.select(lr=1)
    parts = zoo.split(fractions=(0.5, 0.5), by="run")
    assert sorted(np.concatenate(parts).tolist()) == list(range(12))
    runs = [set(zoo.targets["run"][part].tolist()) for part in parts]
    assert [len(each) for each in runs] == [2, 2]
    assert not runs[0] & runs[1]
    assert [len(part) for part in zoo.split()] == [9, 0, 3], "runs stay whole"
    assert [len(part) for part in zoo.split(by="network")] == [8, 2, 2]


def test_commands_take_rows_by_name(own: Zoo, nets: Path, tmp_path: Path) -> None:
    row = f"{own.path}#1"
    assert "deep/llama-1" in printed("zoo", "rows", own.path)
    assert as_json("zoo", "rows", own.path)[1] | {"name": ""} == {
        "name": "", "row": 1, "network": "deep/llama-1", "family": "llama", "loss": 2.5,
        "epochs": 12, "optimizer": "sgd",
    }  # fmt: skip
    summary = as_json("zoo", "info", own.path)
    assert summary["families"] == {"llama": 2, "small_transformer_module": 1}
    assert summary["targets"]["loss"]["max"] == 3.25
    assert "optimizer" in printed("zoo", "info", own.path)
    assert as_json("inspect", row)["family"] == "llama"
    assert as_json("compare", row, nets / "deep" / "llama-1")["same_function"] is True
    assert as_json("compare", row, f"{own.path}#0", code=1)["same_function"] is False
    printed("fingerprint", row, f"{own.path}#2")
    printed("disguise", row, "--out", tmp_path / "other")
    assert as_json("compare", tmp_path / "other", row)["same_function"] is True
    assert_refused("the zoo has 3 rows", "inspect", f"{own.path}#3")


def test_rows_are_chosen_by_targets_of_the_names_of_filters(own: Zoo, tmp_path: Path) -> None:
    def chosen(*filters: object) -> list[int]:
        return [each["row"] for each in as_json("zoo", "rows", own.path, *filters)]

    assert chosen() == [0, 1, 2]
    assert chosen("--optimizer", "sgd") == [1]
    assert chosen("--run", "small", "--run", "llama-0") == [0, 2], "a network is a run of its name"
    words = ("zoo", "rows", own.path)
    assert "zoo: 1 of 3 rows" in printed(*words, "--optimizer", "7")
    assert_refused("has no rows of optimizer 'lion': it has 7, adam, sgd", *words,
                   "--optimizer", "lion")  # fmt: skip
    assert_refused("has no target 'epoch': it has loss, epochs, optimizer", *words, "--epoch", 3)
    assert_refused("found loss, epochs, optimizer", *words, "--min-accuracy", 0.5)
    assert_refused("must lie between 0 and 1", *words, "--max-accuracy", 50)
    zoo = Zoo.create(tmp_path / "more")
    folder = write_example_checkpoint(tmp_path / "llama")
    source = np.random.default_rng()
    drawn = source.random(6).tolist()
    for row, accuracy in enumerate(drawn):
        more = {"val_acc": accuracy, "run": row // 2, "epoch": 10 * (row % 2), "best": row > 3}
        zoo.add(folder, f"net-{row}", loss=1 - accuracy, **more)
    own = zoo
    least, most = sorted(source.random(2).tolist())
    inside = [row for row, accuracy in enumerate(drawn) if least <= accuracy <= most]
    assert chosen("--min-accuracy", least, "--max-accuracy", most) == inside, (drawn, least, most)
    assert chosen("--run", 1, "--epoch", 10) == [3]
    assert chosen("--epoch", 0) == [0, 2, 4]
    assert chosen("--best") == [4, 5]
    assert chosen("--no-best", "--epoch", 10) == [1, 3]


def test_accuracies_of_own_networks_are_drawn(own: Zoo, tmp_path: Path) -> None:
    message = "has no accuracies: expected numbers from 0 to 1 in a column named so, found loss"
    assert_refused(message, "zoo", "plot", own.path, "--out", tmp_path / "h.svg")
    assert not (tmp_path / "h.svg").exists()
    zoo = Zoo.create(tmp_path / "more")
    folder = write_example_checkpoint(tmp_path / "llama")
    for row in range(4):
        zoo.add(folder, f"net-{row}", val_acc=row / 10, acc_percent=10.5 * row)
    printed("zoo", "plot", zoo.path, "--out", tmp_path / "h.svg")
    text = (tmp_path / "h.svg").read_text()
    assert "more: 4 networks" in text
    assert "val acc (%)" in text


def test_damage_is_found_on_opening_and_by_verify(own: Zoo) -> None:
    file = own.path / "networks" / "00001" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"00001' \('deep/llama-1'\): damaged"):
        Zoo.open(own.path).model(1)
    assert len(as_json("zoo", "verify", own.path, code=1)["problems"]) == 1
    assert_refused("damaged", "inspect", f"{own.path}#1")
    (own.path / "index.parquet").write_bytes(b"?")
    assert_refused("index.parquet: damaged", "zoo", "info", own.path)


def test_an_index_that_is_empty_or_of_other_columns_is_one_sentence(own: Zoo) -> None:
    whole = pq.read_table(own.path / "index.parquet", use_threads=False)

    def write(index: pa.Table) -> None:
        out = io.BytesIO()
        pq.write_table(index, out)
        Checksums(own.path).replace("index.parquet", out.getvalue())

    write(whole[:0])
    assert as_json("zoo", "info", own.path)["networks"] == 0
    assert "no networks" in printed("zoo", "info", own.path)
    outside = pa.array(["a", "../../b", "c"])
    for index, message in (
        (whole.drop_columns(["family"]), "expected the columns network, family, checksum, bytes"),
        (pa.concat_tables([whole, whole[:1]]), "column 'network' holds 'llama-0' twice"),
        (whole.set_column(0, "network", outside), "column 'network': a network expected a name"),
        (whole.set_column(4, "loss", pa.array([[1]] * 3)), "column 'loss' of list"),
    ):
        write(index)
        for words in (("info",), ("rows",), ("export", "--out", own.path.parent / "out")):
            assert_refused(message, "zoo", words[0], own.path, *words[1:])


def test_an_export_is_imported_as_the_same_zoo(own: Zoo, tmp_path: Path) -> None:
    (tmp_path / "files" / ".0123abcd.beside.folder").mkdir(parents=True)
    assert "3 networks" in printed("zoo", "export", own.path, "--out", tmp_path / "files")
    table = tmp_path / "files" / "targets.csv"
    assert table.read_text().splitlines()[1] == "llama-0,3.25,10,adam"
    printed("zoo", "import", tmp_path / "files", "--targets", table, "--out", tmp_path / "again")
    again = Zoo.open(tmp_path / "again")
    assert {k: v.tolist() for k, v in again.table.items()} == {
        k: v.tolist() for k, v in own.table.items()
    }


def test_other_commands_say_which_zoo_they_take(own: Zoo, tmp_path: Path) -> None:
    message = "holds networks of a user: expected those of one task that `tnfn zoo build` trains"
    done = tnfn("zoo", "damage", own.path, "--out", tmp_path / "d")
    assert (done.returncode, message in done.stderr) == (2, True)
    with pytest.raises(ZooError, match=message):
        own.space  # noqa: B018
    assert_refused("expected a zoo of small transformers", "zoo", "build", "--out", own.path)
    assert_refused("name their table with --targets", "zoo", "import", tmp_path, "--dry-run")
    assert_refused("lies in the zoo", "zoo", "export", own.path, "--out", own.path / "x")
