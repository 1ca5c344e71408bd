"""A mixed zoo: build, resume, open, summarise, export; its networks are read like any others."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.networks import resolve_network
from transformer_nfn.zoo import (
    BuildOptions,
    ImportFileError,
    SizeGroup,
    StoreError,
    Zoo,
    ZooError,
    build,
    build_mixed,
)
from transformer_nfn.zoo.authors import import_authors
from transformer_nfn.zoo.export import export_zoo
from transformer_nfn.zoo.store.folder import Checksums
from transformer_nfn.zoo.training.build import divide, group_seed
from transformer_nfn.zoo.verify import verify

GROUPS = (SizeGroup(16, 4, 1), SizeGroup(20, 2, 1))
OPTIONS = BuildOptions("digits", runs=9, epochs=2, batch=64, samples=128, seed=3, workers=1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Nine runs over two size groups; tests must not change it."""
    return build_mixed(tmp_path_factory.mktemp("mixed") / "m", OPTIONS, GROUPS)


def test_runs_are_divided_and_every_group_has_its_own_seed() -> None:
    parts = divide(OPTIONS, GROUPS)
    assert [(part.group, part.runs) for part in parts] == [(GROUPS[0], 5), (GROUPS[1], 4)]
    assert [part.seed for part in parts] == [group_seed(3, group) for group in GROUPS]
    assert len({group_seed(s, g) for s in range(5) for g in GROUPS}) == 10
    with pytest.raises(ZooError, match="1 runs cannot be spread over 2 kinds"):
        divide(replace(OPTIONS, runs=1), GROUPS)


def test_a_mixed_zoo_lists_its_groups_and_rows(mixed: Zoo) -> None:
    assert list(mixed.parts) == ["w16-h4-d1", "w20-h2-d1"]
    assert {name: len(part) for name, part in mixed.parts.items()} == {
        "w16-h4-d1": 15, "w20-h2-d1": 12,
    }  # fmt: skip
    assert mixed.table["kind"].tolist() == ["w16-h4-d1"] * 15 + ["w20-h2-d1"] * 12
    assert (len(mixed), mixed.finished, mixed.task, mixed.seeds) == (27, True, "digits", "each")
    assert [zoo.sizes.group for zoo in mixed.parts.values()] == list(GROUPS)
    seeds = np.concatenate([np.unique(zoo.table["seed"]) for zoo in mixed.parts.values()])
    assert len(set(seeds.tolist())) == 9
    assert mixed.parts["w16-h4-d1"].weights([0])["blocks.0.W_Q"].shape == (1, 4, 16, 4)


def test_a_group_equals_a_build_of_it_alone(mixed: Zoo, tmp_path: Path) -> None:
    alone = build(tmp_path / "z", divide(OPTIONS, GROUPS)[1])
    assert np.array_equal(alone.table["checksum"], mixed.parts["w20-h2-d1"].table["checksum"])


def test_an_interrupted_build_resumes(mixed: Zoo, tmp_path: Path) -> None:
    out = Path(shutil.copytree(mixed.path, tmp_path / "m"))
    shutil.rmtree(out / "w20-h2-d1")
    begun = Zoo.open(out)
    assert (begun.finished, list(begun.parts)) == (False, ["w16-h4-d1"])
    assert "not begun: w20-h2-d1" in printed("zoo", "info", out)
    (shard,) = (out / "w16-h4-d1" / "shards").iterdir()
    before = shard.stat().st_mtime_ns
    resumed = build_mixed(out, OPTIONS, GROUPS)
    assert resumed.finished
    assert shard.stat().st_mtime_ns == before
    for name, zoo in resumed.parts.items():
        assert np.array_equal(zoo.table["checksum"], mixed.parts[name].table["checksum"])


def test_another_build_in_the_folder_is_rejected(mixed: Zoo, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another mixed zoo: kinds w16-h4-d1, w20-h2-d1, asked"):
        build_mixed(mixed.path, OPTIONS, (GROUPS[0], SizeGroup()))
    with pytest.raises(StoreError, match="another zoo: epochs 2, asked for 3"):
        build_mixed(mixed.path, replace(OPTIONS, epochs=3), GROUPS)
    with pytest.raises(StoreError, match="holds a mixed zoo: name an empty folder"):
        build(mixed.path, OPTIONS)
    with pytest.raises(StoreError, match="holds a zoo of one kind"):
        build_mixed(mixed.parts["w20-h2-d1"].path, OPTIONS, GROUPS)
    other = replace(divide(OPTIONS, GROUPS)[0], width=20, heads=2)
    with pytest.raises(StoreError, match="holds another zoo: width 16, asked for 20"):
        build(mixed.parts["w16-h4-d1"].path, other)
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"holds other files \('thesis.tex'\)"):
        build_mixed(tmp_path, OPTIONS, GROUPS)


def test_a_mixed_zoo_has_no_sizes_and_no_rows_of_one_layout(mixed: Zoo) -> None:
    assert (mixed.mixed, mixed.known_sizes, mixed.layout) == (True, None, None)
    with pytest.raises(ZooError, match="holds networks of several sizes"):
        mixed.sizes  # noqa: B018
    with pytest.raises(ZooError, match="holds networks of several sizes, not rows of one layout"):
        mixed.weights([0])
    part = Zoo.open(mixed.path / "w20-h2-d1")
    assert (part.mixed, list(part.parts.values())) == (False, [part])


def test_rows_of_a_mixed_zoo_are_those_of_its_parts(mixed: Zoo) -> None:
    """Weights by name, tables, splits by run and a batch in the requested order."""
    rows = [20, 3, 15, 14]
    batch = mixed.batch(rows)
    for i, row in enumerate(rows):
        name, inside = ("w16-h4-d1", row) if row < 15 else ("w20-h2-d1", row - 15)
        part = mixed.parts[name]
        assert mixed.config(row) == {"kind": name, **part.config(inside)}
        expected = part.weights([inside])
        views = batch.layouts[batch.size[i]].views(batch.weights[i : i + 1])
        assert all(torch.equal(views[key], w) for key, w in expected.items())
    parts = mixed.split(seed=2)
    assert sorted(np.concatenate(parts).tolist()) == list(range(27))


def test_a_row_of_a_group_is_a_network_like_any_other(mixed: Zoo) -> None:
    word = f"{mixed.path}/w16-h4-d1#2"
    zoo = mixed.parts["w16-h4-d1"]
    stored = zoo.weights([2])
    with resolve_network(word).as_zoo_network(zoo.sizes) as opened:
        weights = opened.read()
    assert all(torch.equal(weights[name], stored[name][0]) for name in stored)
    with pytest.raises(ValueError, match="mixed zoo: name one network of one kind"):
        resolve_network(mixed.path)
    assert_refused("holds networks of several sizes", "inspect", f"{mixed.path}#2")
    printed("compare", word, word)


MIXED = (
    '"format": 1, "kind": "transformer-nfn mixed zoo", "made_by": "x", "task": "digits", '
    '"seeds": "each"'
)


def test_an_invalid_list_of_groups_is_rejected(tmp_path: Path) -> None:
    for body, words in (
        (f"{{{MIXED.replace('mixed zoo', 'x')}}}", "'kind' expected one of transformer-nfn mixed"),
        (f"{{{MIXED.replace('1', '[1]')}}}", "'format' expected a whole number"),
        (f"{{{MIXED.replace('1', '9')}}}", "format 9 is newer"),
        (f"{{{MIXED.replace('each', 'many')}}}", "'seeds' expected one of one, each, unknown"),
        (f"{{{MIXED.replace('digits', 'x')}}}", "'task' expected one of digits, mnist"),
        (f"{{{MIXED}}}", "lacks 'kinds'"),
        (f'{{{MIXED}, "kinds": []}}', "'kinds' expected names of zoos, each once"),
        (f'{{{MIXED}, "kinds": ["w20-h2-d1", 3]}}', r"'kinds\[1\]' expected a text, found 3"),
        (f'{{{MIXED}, "kinds": ["../w20-h2-d1"]}}', "is not a kind"),
        (f'{{{MIXED}, "kinds": ["w32-h3-d2"]}}', "'kinds': 3 heads do not divide"),
        ("[]", "is not an object"),
    ):
        Checksums(tmp_path).replace("kinds.json", body.encode())
        with pytest.raises(StoreError, match=words):
            Zoo.open(tmp_path)


def test_damage_is_detected_in_any_group(mixed: Zoo, tmp_path: Path) -> None:
    verdict = verify(mixed.path, sample=2)
    assert (verdict.ok, verdict.networks, verdict.rerun) == (True, 27, 4)
    out = Path(shutil.copytree(mixed.path, tmp_path / "m"))
    shard = out / "w20-h2-d1" / "shards" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (problem,) = as_json("zoo", "verify", out, code=1)["problems"]
    assert problem.startswith("w20-h2-d1: ")
    text = (out / "kinds.json").read_text()
    (out / "kinds.json").write_text(text.replace("w20", "w24"))
    assert "kinds.json: damaged" in verify(out).problems[0]


def test_the_command_builds_and_shows_all_groups(tmp_path: Path) -> None:
    words = ("zoo", "build", "--out", tmp_path / "m", "--runs", 4, "--epochs", 1, "--batch", 64)
    words += ("--workers", 1, "--width", "8,16", "--heads", 4, "--depth", 1, "--samples", 128)
    text = printed(*words, "--path", "torch")
    assert "4 runs of 2 kinds of network, 8 checkpoints" in text
    text = printed("zoo", "info", tmp_path / "m")
    assert "w8-h4-d1" in text
    assert "w16-h4-d1" in text
    summary = as_json("zoo", "info", tmp_path / "m")
    assert (summary["runs"], summary["checkpoints"], summary["finished"]) == (4, 8, True)
    assert summary["kinds"]["w8-h4-d1"]["network"] == {"width": 8, "heads": 4, "depth": 1}
    assert "width 8, 4 heads, 1 block" in printed("zoo", "info", tmp_path / "m" / "w8-h4-d1")
    printed("zoo", "plot", tmp_path / "m", "--out", tmp_path / "h.svg")
    assert "w8-h4-d1: 4" in (tmp_path / "h.svg").read_text()


def test_exported_networks_record_their_heads(mixed: Zoo, tmp_path: Path) -> None:
    assert export_zoo(mixed, tmp_path / "out") == 27
    zoo = mixed.parts["w16-h4-d1"]
    files = sorted((tmp_path / "out" / "w16-h4-d1" / "digits").iterdir())
    with resolve_network(files[0]).as_zoo_network(replace(zoo.sizes, heads=2)) as opened:
        assert opened.sizes == zoo.sizes
        assert opened.read()["blocks.0.W_Q"].shape == (4, 16, 4)
        with pytest.raises(ValueError, match="expected 2 heads, found 4"):
            replace(opened, sizes=replace(zoo.sizes, heads=2)).read()
    (two_heads, *_) = (tmp_path / "out" / "w20-h2-d1" / "digits").iterdir()
    assert not any("heads" in key for key in torch.load(two_heads, weights_only=True))


def test_an_exported_mixed_zoo_is_imported_unchanged(mixed: Zoo, tmp_path: Path) -> None:
    export_zoo(mixed, tmp_path / "out")
    assert "27 checkpoints" in printed(
        "zoo", "import", tmp_path / "out", "--out", tmp_path / "back"
    )
    back = Zoo.open(tmp_path / "back")
    assert (len(back), list(back.parts), back.task) == (27, list(mixed.parts), mixed.task)
    assert (back.seeds, back.finished) == (mixed.seeds, True)
    _, report = import_authors(tmp_path / "out" / "w16-h4-d1", tmp_path / "one")
    assert not report.stray
    assert Zoo.open(tmp_path / "one").sizes.group == GROUPS[0]
    for name, zoo in mixed.parts.items():
        ours = {w.numpy().tobytes() for w in zoo.weights(np.arange(len(zoo)))["blocks.0.W_Q"]}
        again = back.parts[name].weights(np.arange(len(zoo)))["blocks.0.W_Q"]
        assert {w.numpy().tobytes() for w in again} == ours
    shutil.rmtree(tmp_path / "out" / "w20-h2-d1")
    shutil.copytree(tmp_path / "out" / "w16-h4-d1", tmp_path / "out" / "w20-h2-d1")
    with pytest.raises(ImportFileError, match=r"networks of width 20.* found width 16"):
        import_authors(tmp_path / "out", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
