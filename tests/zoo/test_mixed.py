"""A mixed zoo: built, resumed, opened, looked at, exported; its networks are read as any others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from transformer_nfn.cli.app import app
from transformer_nfn.networks import resolve_network, resolve_networks
from transformer_nfn.zoo import (
    ImportFileError,
    Kind,
    MixedZoo,
    Settings,
    StoreError,
    Zoo,
    ZooError,
    build,
    build_mixed,
    open_zoo,
)
from transformer_nfn.zoo.authors import import_authors
from transformer_nfn.zoo.export import export_authors
from transformer_nfn.zoo.training.build import kind_seed, spread
from transformer_nfn.zoo.verify import verify

KINDS = (Kind(16, 4, 1), Kind(20, 2, 1))
SETTINGS = Settings("digits", runs=9, epochs=2, batch=64, samples=128, seed=3)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> MixedZoo:
    """Nine runs over two kinds; tests must not change it."""
    return build_mixed(tmp_path_factory.mktemp("mixed") / "m", SETTINGS, KINDS, workers=1)


def tnfn(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_runs_are_spread_and_every_kind_has_its_own_seed() -> None:
    parts = spread(SETTINGS, KINDS)
    assert [(part.kind, part.runs) for part in parts] == [(KINDS[0], 5), (KINDS[1], 4)]
    assert [part.seed for part in parts] == [kind_seed(3, kind) for kind in KINDS]
    assert len({kind_seed(s, k) for s in range(5) for k in KINDS}) == 10
    with pytest.raises(ZooError, match="1 runs cannot be spread over 2 kinds"):
        spread(replace(SETTINGS, runs=1), KINDS)


def test_a_mixed_zoo_lists_its_kinds_and_rows(mixed: MixedZoo) -> None:
    assert list(mixed.zoos) == ["w16-h4-d1", "w20-h2-d1"]
    assert mixed.rows == {"w16-h4-d1": 15, "w20-h2-d1": 12}
    assert (len(mixed), mixed.finished, mixed.task, mixed.seeds) == (27, True, "digits", "each")
    assert [zoo.arch.kind for zoo in mixed] == list(KINDS)
    seeds = np.concatenate([np.unique(zoo.table["seed"]) for zoo in mixed])
    assert len(set(seeds.tolist())) == 9
    assert mixed["w16-h4-d1"].weights([0])["blocks.0.W_Q"].shape == (1, 4, 16, 4)
    with pytest.raises(ZooError, match="no networks of the kind 'w99-h1-d1': it has w16-"):
        mixed["w99-h1-d1"]


def test_every_kind_is_the_zoo_a_build_of_it_alone_gives(
    mixed: MixedZoo, tmp_path: Path
) -> None:
    alone = build(tmp_path / "z", spread(SETTINGS, KINDS)[1], workers=1)
    assert np.array_equal(alone.table["checksum"], mixed["w20-h2-d1"].table["checksum"])


def test_an_interrupted_build_goes_on(mixed: MixedZoo, tmp_path: Path) -> None:
    out = Path(shutil.copytree(mixed.path, tmp_path / "m"))
    shutil.rmtree(out / "w20-h2-d1")
    begun = MixedZoo.open(out)
    assert (begun.finished, list(begun.zoos)) == (False, ["w16-h4-d1"])
    assert "not begun: w20-h2-d1" in tnfn("zoo", "info", out)[1]
    (shard,) = (out / "w16-h4-d1" / "shards").iterdir()
    before = shard.stat().st_mtime_ns
    whole = build_mixed(out, SETTINGS, KINDS, workers=1)
    assert whole.finished
    assert shard.stat().st_mtime_ns == before
    for name, zoo in whole.zoos.items():
        assert np.array_equal(zoo.table["checksum"], mixed[name].table["checksum"])


def test_more_runs_than_before_make_every_kind_grow(mixed: MixedZoo, tmp_path: Path) -> None:
    out = Path(shutil.copytree(mixed.path, tmp_path / "m"))
    grown = build_mixed(out, replace(SETTINGS, runs=12), KINDS, workers=1)
    assert grown.rows == {"w16-h4-d1": 18, "w20-h2-d1": 18}
    for name, zoo in mixed.zoos.items():
        before, after = (set(z.table["checksum"].tolist()) for z in (zoo, grown[name]))
        assert before < after


def test_another_build_in_the_folder_is_refused(mixed: MixedZoo, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another mixed zoo: kinds w16-h4-d1, w20-h2-d1, asked"):
        build_mixed(mixed.path, SETTINGS, (KINDS[0], Kind()))
    with pytest.raises(StoreError, match="another zoo: epochs 2, asked for 3"):
        build_mixed(mixed.path, replace(SETTINGS, epochs=3), KINDS)
    with pytest.raises(StoreError, match="holds a mixed zoo: name an empty folder"):
        build(mixed.path, SETTINGS)
    with pytest.raises(StoreError, match="holds a zoo of one kind"):
        build_mixed(mixed["w20-h2-d1"].path, SETTINGS, KINDS)
    other = replace(spread(SETTINGS, KINDS)[0], width=20, heads=2)
    with pytest.raises(StoreError, match="holds another zoo: width 16, asked for 20"):
        build(mixed["w16-h4-d1"].path, other)
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"holds other files \('thesis.tex'\)"):
        build_mixed(tmp_path, SETTINGS, KINDS)


@pytest.mark.parametrize(
    ("change", "means", "words"),
    [
        ({"task": "imagenet"}, {}, "unknown task"),
        ({"epochs": 0}, {}, "epochs"),
        ({}, {"engine": "slurm"}, "unknown engine"),
        ({}, {"workers": 0}, "workers"),
        ({}, {"data": "/nowhere/at/all"}, "does not exist"),
        ({}, {"path": "fused"}, "path fused was asked for, but"),
    ],
)
def test_bad_settings_write_nothing(
    tmp_path: Path, change: dict[str, object], means: dict[str, object], words: str
) -> None:
    with pytest.raises(ZooError, match=words):
        build_mixed(tmp_path / "m", replace(SETTINGS, **change), KINDS, **means)  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()


def test_a_mixed_zoo_is_no_zoo_of_one_kind(mixed: MixedZoo) -> None:
    with pytest.raises(StoreError, match="is a mixed zoo: name one of its kinds"):
        Zoo.open(mixed.path)
    assert isinstance(open_zoo(mixed.path), MixedZoo)
    assert isinstance(open_zoo(mixed.path / "w20-h2-d1"), Zoo)
    with pytest.raises(StoreError, match="is not a mixed zoo: it has no kinds"):
        MixedZoo.open(mixed.path / "w20-h2-d1")


def test_a_mixed_zoo_means_the_networks_of_all_its_kinds(mixed: MixedZoo) -> None:
    networks = resolve_networks([mixed.path, f"{mixed.path}/w20-h2-d1#3-4"])
    assert len(networks) == 27 + 2
    assert [networks[0].name, networks[15].name, networks[-1].name] == [
        f"{mixed.path}/{end}" for end in ("w16-h4-d1#0", "w20-h2-d1#0", "w20-h2-d1#4")
    ]


def test_a_row_of_a_kind_is_a_network_like_any_other(mixed: MixedZoo) -> None:
    word = f"{mixed.path}/w16-h4-d1#2"
    space, weights = resolve_network(word).in_space()
    assert space == mixed["w16-h4-d1"].space
    stored = mixed["w16-h4-d1"].weights([2])
    assert all(torch.equal(weights[name][0], stored[name]) for name in stored)
    with pytest.raises(ValueError, match="mixed zoo: name one network of one kind"):
        resolve_network(mixed.path)
    with pytest.raises(ValueError, match="mixed zoo: name one of its kinds"):
        resolve_network(f"{mixed.path}#2")
    assert tnfn("compare", word, word)[0] == 0


MIXED = '"format": 1, "kind": "transformer-nfn mixed zoo"'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"kind": "x"}', "kind 'x' is not a mixed zoo"),
        ('{"kind": "transformer-nfn mixed zoo"}', "has no format"),
        ('{"kind": "transformer-nfn mixed zoo", "format": 9}', "format 9 is newer"),
        (f"{{{MIXED}}}", "expected a list of kinds, found None"),
        (f'{{{MIXED}, "kinds": ["../w20-h2-d1"]}}', "is not a kind"),
        (f'{{{MIXED}, "kinds": ["w32-h3-d2"]}}', "do not divide"),
        ("[]", "is not an object"),
    ],
)
def test_a_list_of_kinds_that_cannot_be_is_refused(tmp_path: Path, body: str, words: str) -> None:
    from transformer_nfn.zoo.store.folder import Checksums

    Checksums(tmp_path).replace("kinds.json", body.encode())
    with pytest.raises(StoreError, match=words):
        MixedZoo.open(tmp_path)


def test_damage_is_found_in_any_kind(mixed: MixedZoo, tmp_path: Path) -> None:
    verdict = verify(mixed.path, sample=2)
    assert (verdict.ok, verdict.networks, verdict.rerun) == (True, 27, 4)
    out = Path(shutil.copytree(mixed.path, tmp_path / "m"))
    shard = out / "w20-h2-d1" / "shards" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    code, text = tnfn("zoo", "verify", out, "--json")
    assert code == 1
    (problem,) = json.loads(text)["problems"]
    assert problem.startswith("w20-h2-d1: ")
    text = (out / "kinds.json").read_text()
    (out / "kinds.json").write_text(text.replace("w20", "w24"))
    assert "kinds.json: damaged" in verify(out).problems[0]


def test_the_command_builds_and_shows_all_kinds(tmp_path: Path) -> None:
    words = ("zoo", "build", "--out", tmp_path / "m", "--runs", 4, "--epochs", 1, "--batch", 64)
    words += ("--workers", 1, "--width", "8,16", "--heads", 4, "--depth", 1, "--samples", 128)
    code, text = tnfn(*words, "--path", "torch")
    assert (code, "4 runs of 2 kinds of network, 8 checkpoints" in text) == (0, True)
    code, text = tnfn("zoo", "info", tmp_path / "m")
    assert (code, "w8-h4-d1" in text, "w16-h4-d1" in text) == (0, True, True)
    found = json.loads(tnfn("zoo", "info", tmp_path / "m", "--json")[1])
    assert (found["runs"], found["checkpoints"], found["finished"]) == (4, 8, True)
    assert found["kinds"]["w8-h4-d1"]["network"] == {"width": 8, "heads": 4, "depth": 1}
    assert "width 8, 4 heads, 1 block" in tnfn("zoo", "info", tmp_path / "m" / "w8-h4-d1")[1]
    assert tnfn("zoo", "plot", tmp_path / "m", "--out", tmp_path / "h.svg")[0] == 0
    assert "w8-h4-d1: 4" in (tmp_path / "h.svg").read_text()


def test_exported_networks_of_four_heads_say_so(mixed: MixedZoo, tmp_path: Path) -> None:
    assert export_authors(mixed, tmp_path / "out") == 27
    zoo = mixed["w16-h4-d1"]
    files = sorted((tmp_path / "out" / "w16-h4-d1" / "digits").iterdir())
    with resolve_network(files[0]).as_zoo_network(replace(zoo.arch, heads=2)) as opened:
        assert opened.sizes == zoo.arch
        assert opened.read()["blocks.0.W_Q"].shape == (4, 16, 4)
        with pytest.raises(ValueError, match="expected 2 heads, found 4"):
            replace(opened, sizes=replace(zoo.arch, heads=2)).read()
    space, _ = resolve_network(files[0]).in_space()
    assert space.shapes == zoo.space.shapes
    (two_heads, *_) = (tmp_path / "out" / "w20-h2-d1" / "digits").iterdir()
    assert not any("heads" in key for key in torch.load(two_heads, weights_only=True))


def test_an_exported_mixed_zoo_is_imported_as_it_was(mixed: MixedZoo, tmp_path: Path) -> None:
    export_authors(mixed, tmp_path / "out")
    code, text = tnfn("zoo", "import", tmp_path / "out", "--out", tmp_path / "back")
    assert (code, "27 checkpoints" in text) == (0, True)
    back = MixedZoo.open(tmp_path / "back")
    assert (back.kinds, back.rows, back.task) == (mixed.kinds, mixed.rows, mixed.task)
    assert (back.seeds, back.finished) == (mixed.seeds, True)
    for name, zoo in mixed.zoos.items():
        ours = {w.numpy().tobytes() for w in zoo.weights(np.arange(len(zoo)))["blocks.0.W_Q"]}
        again = back[name].weights(np.arange(len(zoo)))["blocks.0.W_Q"]
        assert {w.numpy().tobytes() for w in again} == ours
    shutil.rmtree(tmp_path / "out" / "w20-h2-d1")
    shutil.copytree(tmp_path / "out" / "w16-h4-d1", tmp_path / "out" / "w20-h2-d1")
    with pytest.raises(ImportFileError, match=r"networks of width 20.* found width 16"):
        import_authors(tmp_path / "out", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_networks_of_another_kind_are_imported_as_they_were_exported(
    mixed: MixedZoo, tmp_path: Path
) -> None:
    zoo = mixed["w16-h4-d1"]
    export_authors(zoo, tmp_path / "out")
    back, report = import_authors(tmp_path / "out", tmp_path / "back")
    assert back.arch.kind == Kind(16, 4, 1)
    assert not report.stray
    ours = {w.numpy().tobytes() for w in zoo.weights(np.arange(len(zoo)))["blocks.0.W_Q"]}
    theirs = {w.numpy().tobytes() for w in back.weights(np.arange(len(back)))["blocks.0.W_Q"]}
    assert ours == theirs
