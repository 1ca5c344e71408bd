"""Every command takes every way to name a network: files, folders, rows of a zoo, names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn import spaces
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.networks import read_network, resolve_network, save_network
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.module import to_state_dict

ROW = "mnist-sample#3"
FILES = ["ours.safetensors", "plain.safetensors", "authors.safetensors", "authors.pt"]
FILES += ["hub", "shards", "shards/model.safetensors.index.json"]


@pytest.fixture(scope="module")
def zoo() -> Zoo:
    return Zoo.open("mnist-sample")


@pytest.fixture(scope="module")
def networks(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One network of the zoo, in every form there is; tests must not change them."""
    folder = tmp_path_factory.mktemp("networks")
    named = {name: w[0] for name, w in zoo.weights([3]).items()}
    state = to_state_dict(zoo.sizes, named)
    save_network(folder / "ours.safetensors", zoo.space, named)
    save_file(named, folder / "plain.safetensors")
    save_file(state, folder / "authors.safetensors")
    torch.save(state, folder / "authors.pt")
    (folder / "hub").mkdir()
    torch.save(state, folder / "hub" / "pytorch_model.bin")
    (folder / "shards").mkdir()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(named)}
    for shard in set(weight_map.values()):
        held = {name: named[name] for name, its in weight_map.items() if its == shard}
        save_file(held, folder / "shards" / shard)
    index = folder / "shards" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return [ROW, f"{zoo.path}#3", *(str(folder / name) for name in FILES)]


def test_every_name_gives_the_same_network(zoo: Zoo, networks: list[str]) -> None:
    expected = {name: w[0] for name, w in zoo.weights([3]).items()}
    for text in networks:
        with resolve_network(text).as_zoo_network(zoo.sizes) as opened:
            assert opened.sizes == zoo.sizes
            weights = opened.read()
        assert all(torch.equal(weights[name], w) for name, w in expected.items())


def test_fingerprint_and_predict_take_them_all(networks: list[str]) -> None:
    out = printed("fingerprint", *networks, "--json")
    assert max(max(row) for row in json.loads(out)["distances"]) == 0
    found = as_json("predict", "mnist-boosting", *networks)
    assert [p["name"] for p in found] == networks
    assert len({p["value"] for p in found}) == 1


def test_disguise_inspect_and_compare_take_them_all(networks: list[str], tmp_path: Path) -> None:
    for i, text in enumerate(networks):
        out = tmp_path / (f"{i}" if Path(text).is_dir() or "index" in text else f"{i}.safetensors")
        printed("disguise", text, "--out", out)
        printed("compare", text, ROW, "--json")
        printed("inspect", text)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "safetensors"])
def test_a_network_of_a_weight_space_is_read_in_python(suffix: str, tmp_path: Path) -> None:
    space = spaces.biased_block(6, 2, 3, 2, 5)
    weights = space.randn(1, dtype=torch.bfloat16)
    path = tmp_path / f"net.{suffix}"
    save_network(path, space, weights)
    found, again = read_network(path, None if suffix == "safetensors" else space)
    assert found == space
    assert all(torch.equal(again[n], weights[n]) for n in weights)
    with pytest.raises(SpaceError, match="a file holds one network"):
        save_network(tmp_path / "many.safetensors", space, space.randn(2))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == "safetensors":
        words = "networks.read_network` reads in Python: expected a checkpoint of a transformer"
        for command in ("inspect", "fingerprint"):
            assert_refused(words, command, path)
        for command in ("compare", "diff"):
            assert_refused(words, command, path, ROW)
            assert_refused(words, command, ROW, path)
        assert_refused(words, "disguise", path, "--out", tmp_path / "out")
        assert_refused(words, "align", ROW, path, "--out", tmp_path / "out")


def test_a_disguised_network_is_known_as_a_whole_and_predicted_alike(
    zoo: Zoo, tmp_path: Path
) -> None:
    """Predictors are invariant under the paper's group; a disguise has more than that."""
    original, disguised = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weights = {n: w.double() for n, w in zoo.weights([3]).items()}
    save_network(original, zoo.space, weights)
    element = zoo.space.group.random(torch.Generator().manual_seed(0), condition=10)
    save_network(disguised, zoo.space, element.act({n: w[None] for n, w in weights.items()}))
    assert as_json("compare", original, disguised)["verdict"] == "same"
    first, second = as_json("predict", "mnist-boosting", original, disguised)
    assert abs(first["value"] - second["value"]) < 1e-3


def test_unlike_whole_networks_are_told_apart_by_a_witness() -> None:
    found = as_json("compare", "mnist-sample#3", "mnist-sample#4", code=1)
    assert found["same_function"] is False
    witness = found["proof"]["witness"]
    assert witness["difference"] > 100 * witness["noise"]


PAIRS = [("mnist-sample#0", "mnist-sample#1"), ("ag-news-sample#2", "ag-news-sample#3")]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_whole_rows_are_known_under_a_disguise(name: str, other: str, tmp_path: Path) -> None:
    """Stored in half precision, and with a basis of its own between any two sublayers."""
    out = tmp_path / "disguised.pt"
    assert tnfn("disguise", name, "--out", out, "--condition", 300)[0] == 0
    code, said, err = tnfn("compare", name, out, "--json")
    assert code == 0, err
    assert json.loads(said)["verdict"] == "same"
    assert tnfn("compare", name, other)[0] == 1
    code, said, err = tnfn("fingerprint", name, out, other, "--json")
    assert code == 0, err
    first, near, far = json.loads(said)["distances"][0]
    assert (first, near) == (0, 0)
    assert far > 0.6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mnist-sample#x", "a row is a whole number, as in mnist-sample#12"),
        ("mnist-sample#-1", "a row is a whole number"),
        ("mnist-sample#160", "'mnist-sample#160': the zoo has 160 rows, counted from 0"),
        ("mnist-boosting#0", "'mnist-boosting' is a predictor, expected a zoo"),
        ("nowhere#0", "there is no folder 'nowhere' and no zoo of that name"),
        ("some/where#0", "'some/where' is not a zoo"),
        ("nowhere", "there is no file 'nowhere'"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "fingerprint"])
def test_a_name_for_nothing_is_one_sentence(command: str, text: str, words: str) -> None:
    run = ["mnist-boosting"] if command == "predict" else []
    assert_refused(words, command, *run, text)


def test_a_zoo_is_no_network_and_a_file_named_like_a_row_is(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"is a zoo of many networks: name one, as in .*#0"):
        resolve_network(zoo.path)
    monkeypatch.chdir(tmp_path)
    save_file({"W": torch.ones(2)}, "mnist-sample#3")
    assert list(resolve_network("mnist-sample#3").open_file()) == ["W"]


def test_a_network_of_another_task_is_refused() -> None:
    code, _, err = tnfn("predict", "ag-news-boosting", ROW)
    assert code == 2
    shown = "is of another architecture: expected 0 pixels in a patch, found 16"
    assert f"'mnist-sample#3' {shown}" in err
