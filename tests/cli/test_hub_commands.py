"""Every command that takes a checkpoint takes a model of a hub."""

import json
from pathlib import Path

import pytest

from hub_server import Hub, read_folder
from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.checkpoints import open_model
from transformer_nfn.io.hub import commit_of
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import Zoo

A, B = "org/model-a", "org/model-b"


@pytest.fixture
def folders(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two models, here and on the hub."""
    monkeypatch.chdir(tmp_path)
    a, b = (write_example_checkpoint(tmp_path / f"local-{seed}", seed) for seed in range(2))
    hub.put(A, a)
    hub.put(B, b)
    return a, b


def test_reports_are_those_of_the_folders(folders: tuple[Path, Path]) -> None:
    for command, code in (("compare", 1), ("diff", 0)):
        there, here = as_json(command, A, B, code=code), as_json(command, *folders, code=code)
        assert there == here
    there, here = as_json("inspect", A), as_json("inspect", folders[0])
    assert there == {**here, "where": A}
    there, here = as_json("fingerprint", A, B), as_json("fingerprint", *folders)
    assert there["distances"] == here["distances"]
    assert [p["name"] for p in there["fingerprints"]] == [A, B]


def test_what_is_written_is_written_here(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert "the function of org/model-a" in printed("disguise", A, "--out", "disguised")
    assert tnfn("compare", A, "disguised").returncode == 0
    printed("align", "disguised", A, "--out", "aligned")
    assert tnfn("compare", folders[0], "aligned").returncode == 0
    assert not any(path.is_symlink() for path in (tmp_path / "disguised").rglob("*"))


def test_networks_of_a_zoo_are_predicted(folders: tuple[Path, Path], hub: Hub) -> None:
    printed("disguise", "mnist-sample#3", "--out", "row.safetensors")
    hub.put("org/row", {"model.safetensors": Path("row.safetensors").read_bytes()})
    here, there = (
        as_json("predict", "mnist-boosting", name)
        for name in ("row.safetensors", "org/row")
    )
    assert there == [{**row, "name": "org/row"} for row in here]


def test_a_zoo_of_listed_models(folders: tuple[Path, Path]) -> None:
    Path("ids.txt").write_text(f"# models\n{A}\n\nhf:{B}@main\n")
    told = as_json("zoo", "import", "--list", "ids.txt", "--out", "zoo")
    assert [(f["file"], f["action"]) for f in told["files"]] == [
        (A, "import"), (f"hf:{B}@main", "import")
    ]  # fmt: skip
    zoo = Zoo.open("zoo")
    assert zoo.table["network"].tolist() == [A, f"{B}@main"]
    with zoo.model(0) as stored, open_model(folders[0]) as model:
        assert stored["token"].equal(model["token"])
    Path("ids.txt").write_text(f"{A}\norg/nowhere\n{B}\n")
    again = tnfn("zoo", "import", "--list", "ids.txt", "--out", "zoo")
    assert (again.returncode, "'org/nowhere' is no model" in again.stderr) == (2, True)
    told = as_json("zoo", "import", "--list", "ids.txt", "--out", "zoo", "--skip")
    assert [f["action"] for f in told["files"]] == ["present", "skip", "import"]
    assert len(Zoo.open("zoo")) == 3
    Path("ids.txt").write_text("# none\n")
    assert_refused("names no checkpoint", "zoo", "import", "--list", "ids.txt", "--out", "z")
    assert_refused("or a list of them with --list", "zoo", "import", "--out", "z")


def test_no_request_without_the_network(folders: tuple[Path, Path], hub: Hub) -> None:
    printed("inspect", A)
    commit_of.cache_clear()
    asked = len(hub.requests)
    assert as_json("inspect", A, "--offline")["where"] == A
    assert as_json("--offline", "inspect", A)["where"] == A
    assert_refused("--offline", "inspect", B, "--offline", "--json")
    assert len(hub.requests) == asked


def test_it_is_said_what_is_fetched(folders: tuple[Path, Path]) -> None:
    size = sum(len(data) for data in read_folder(folders[0]).values())
    done = tnfn("inspect", A, "--json")
    assert f"fetching 2 files of {A}, {size / 1000:.1f} kB" in done.stderr
    assert json.loads(done.stdout)["where"] == A
