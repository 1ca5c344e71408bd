"""`tnfn compare` and `tnfn fingerprint` as a user runs them, on small checkpoints."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_families import build, save
from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.checkpoints import pairs
from transformer_nfn.checkpoints.pairs import AllPairs, Pair, PairsError, relate_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two GPT-2s, a disguise of the first, a Llama, and a folder that is no checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    for name, family, seed in (("a", "gpt2", 0), ("other", "gpt2", 1), ("llama", "llama", 0)):
        save(build(name=family, dtype=torch.float32, seed=seed), folder / name)
    printed("disguise", folder / "a", "--out", folder / "disguised", "--keep-tie")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def test_a_disguise_is_the_same_by_proof_and_only_then(models, tmp_path):
    figure = tmp_path / "blocks.png"
    shown = printed(
        "compare", models / "a", models / "disguised", "--no-prove", "--figure", figure, code=3
    )
    assert "consistent with a disguise, not proved (score 1.000)" in shown
    assert figure.stat().st_size > 1000
    answer = as_json("compare", models / "a", models / "disguised")
    assert answer["verdict"] == "same"
    assert answer["proof"]["same_function"] is True
    assert "1.W_Q" in answer["proof"]["tensors"]


def test_token_ids_separate_unrelated_models(models):
    shown = printed("compare", models / "a", models / "other", "--prove", code=1)
    assert "unrelated" in shown
    assert "on token ids [" in shown


def test_other_families_are_not_one_model(models):
    shown = printed("compare", models / "a", models / "llama", code=1)
    assert shown.startswith("different: ")
    assert "not one model in disguise" in shown


def test_scripts_ask_by_exit_code(models, tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(models / "a", tuned)
    weights = load_file(tuned / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for key, w in weights.items():
        noise = torch.randn(w.shape, generator=generator)
        weights[key] = w + 0.05 * w.abs().mean() * noise if w.ndim > 1 else w
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    codes = {  # same, same-function, derived
        models / "disguised": (0, 0, 0), tuned: (1, 1, 0), models / "other": (1, 1, 1),
        models / "llama": (1, 1, 3),
    }  # fmt: skip
    for path, expected in codes.items():
        for word, code in zip(("same", "same-function", "derived"), expected, strict=True):
            printed("compare", models / "a", path, "--expect", word, code=code)
    scores = ("compare", models / "a", models / "disguised", "--no-prove", "--expect")
    for word, code in (("same", 3), ("same-function", 3), ("derived", 0)):
        printed(*scores, word, code=code)
    assert_refused("same, same-function or derived, found 'sam'", *scores, "sam")
    assert_refused("--prove, --expect", "compare", "--matrix", models, "--expect", "same")


def test_what_cannot_be_read_is_an_error(models):
    assert_refused("there is no file", "compare", models / "a", models / "nothing")


def test_fingerprints_are_stored_and_found_again(models, tmp_path):
    database = tmp_path / "known.parquet"
    added = printed("fingerprint", models / "a", models / "other", "--add", database)
    assert "which now has 2" in added
    more = tnfn("fingerprint", models / "llama", "--add", database)
    assert "which now has 3" in more.stdout
    found = tnfn("fingerprint", models / "disguised", "--search", database)
    assert "same up to" in found.stdout
    assert "`tnfn compare` decides" in found.stdout
    query = str(models / "disguised")
    answer = as_json("fingerprint", query, "--search", database)
    nearest = answer["relatives"][query]
    assert nearest[0]["name"] == str(models / "a")
    assert nearest[0]["distance"] == 0
    assert nearest[0]["alike"] == "same up to rounding"
    assert nearest[1]["distance"] > 0.85
    assert answer["fingerprints"][0]["family"] == "gpt2"


def test_files_of_fingerprints_stand_for_their_models(models, tmp_path):
    stored, joined = tmp_path / "one.parquet", tmp_path / "all.parquet"
    printed("fingerprint", models / "a", "--out", stored)
    assert_refused("--add adds to it", "fingerprint", models / "a", "--out", stored)
    printed("fingerprint", stored, "--add", joined)
    answer = as_json("fingerprint", stored, models / "disguised")
    assert answer["distances"][0][1] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search", "none.parquet"], "no such database"),
        (["--out", "x.parquet", "--add", "y.parquet"], "give one of them"),
        (["missing"], "missing"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(models, words, message):
    assert_refused(message, "fingerprint", models / "a", *words)


def test_a_damaged_database_is_named(models, tmp_path):
    database = tmp_path / "known.parquet"
    database.write_bytes(b"PAR1 and then nothing")
    for option in ("--search", "--add"):
        assert_refused(f"'{database}': damaged", "fingerprint", models / "a", option, database)
    assert database.read_bytes() == b"PAR1 and then nothing"


def test_all_pairs_of_a_folder(models, tmp_path):
    out, figure = tmp_path / "pairs.json", tmp_path / "pairs.png"
    shown = printed("compare", "--matrix", models, "--out", out, "--figure", figure)
    assert "related: a, disguised" in shown
    assert "not read: broken" in shown
    assert "gpt2, 32 wide, 3 blocks against llama, 32 wide, 3 blocks" in shown
    assert figure.stat().st_size > 5000
    kept = json.loads(out.read_text())
    verdicts = {(p["a"], p["b"]): p["verdict"] for p in kept["pairs"]}
    assert verdicts == {
        ("a", "disguised"): "same",
        ("a", "llama"): "not comparable",
        ("a", "other"): "unrelated",
        ("disguised", "llama"): "not comparable",
        ("disguised", "other"): "unrelated",
        ("llama", "other"): "not comparable",
    }
    with patch.object(pairs, "relate_pair", side_effect=AssertionError("compared again")):
        again = tnfn("compare", "--matrix", models, "--out", out, "--json")
    assert json.loads(again.stdout) == kept


@pytest.mark.nightly
def test_an_interrupted_run_goes_on_where_it_stopped(models, tmp_path):
    out, before = tmp_path / "pairs.json", pairs.relate_pair
    calls = []

    def stops(a, b, options=None):
        calls.append((a.name, b.name))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return before(a, b, options)

    with patch.object(pairs, "relate_pair", stops), pytest.raises(KeyboardInterrupt):
        relate_folder(models, out=out)
    assert len(json.loads(out.read_text())["pairs"]) == 2
    with patch.object(pairs, "relate_pair", stops):
        result = relate_folder(models, out=out)
    assert len(calls) == 3 + 4
    assert len(result.pairs) == 6


@pytest.mark.nightly
def test_ray_gives_the_same_and_a_lost_pair_fails_alone(models, tmp_path, monkeypatch):
    class LostError(Exception):
        pass

    def remote(work):
        def start(a, b, architecture):
            lost = (a.name, b.name) == ("a", "llama")
            return LostError("worker died") if lost else work(a, b, architecture)

        task = SimpleNamespace(remote=lambda *words: SimpleNamespace(value=start(*words)))
        return SimpleNamespace(options=lambda **_: task)

    def get(reference):
        if isinstance(reference.value, LostError):
            raise reference.value
        return reference.value

    class Reference(SimpleNamespace):
        __hash__ = object.__hash__

    ray = SimpleNamespace(
        is_initialized=lambda: True, remote=remote, get=get,
        wait=lambda refs, num_returns: (refs[:1], refs[1:]),
        exceptions=SimpleNamespace(RayError=LostError),
    )  # fmt: skip
    monkeypatch.setattr(f"{__name__}.SimpleNamespace", Reference)
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    out = tmp_path / "pairs.json"
    on_ray = relate_folder(models, engine="ray", out=out)
    local = relate_folder(models)
    apart = [(x, y) for x, y in zip(on_ray.pairs, local.pairs, strict=True) if x != y]
    assert [x.verdict for x, _ in apart] == ["failed"]
    assert "was lost on the cluster" in apart[0][0].reason
    assert relate_folder(models, out=out).pairs == local.pairs


@pytest.mark.usefixtures("no_ray_cluster")
def test_a_missing_cluster_is_one_sentence(models):
    assert_refused("no Ray cluster", "compare", "--matrix", models, "--engine", "ray")


def test_invalid_folders_and_files_of_pairs(models, tmp_path):
    (tmp_path / "other.json").write_text("{")
    (tmp_path / "later.json").write_text('{"kind": "transformer-nfn pairs", "format": 5}')
    for words, message in (
        (["--matrix", tmp_path / "none"], "no such folder"),
        (["--matrix", tmp_path], "expected at least two checkpoints that can be read, found 0"),
        (["--matrix", models, "--out", tmp_path / "other.json"], "is not JSON"),
        (["--matrix", models, "--out", tmp_path / "later.json"], "pairs of format 5, expected 1"),
        (["--matrix", models, "--engine", "abacus"], "must be 'local' or 'ray'"),
        ([models / "a", models / "llama", "--matrix", models], "without A and B"),
        ([models / "a"], "name two networks"),
        ([models / "a", models / "a", "--engine", "ray"], "are for --matrix"),
    ):
        assert_refused(message, "compare", *words)
    with pytest.raises(PairsError):
        relate_folder(tmp_path)


def test_indirectly_related_models_are_one_group():
    def pair(a, b, verdict):
        return Pair(a, b, ("", ""), verdict, None, None, "")

    pairs = [pair("a", "d", "derived"), pair("b", "c", "unrelated"), pair("d", "c", "partly")]
    assert AllPairs(dict.fromkeys("abcd", ""), {}, pairs).groups() == [["a", "c", "d"], ["b"]]
