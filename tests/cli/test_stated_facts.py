"""`--set` and `--family`: a fact that no file states is asked for, and never assumed."""

import json
import tomllib
from pathlib import Path

import pytest
import tiny_checkpoints
import torch

from tiny_families import encoder
from tnfn_command import assert_refused, printed, tnfn

STATED = ("--set", "nhead=4", "--set", "norm_first=true", "--set", "activation=gelu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "own.pt"
    torch.save(encoder(norm_first=True, final=True, activation="gelu").state_dict(), path)
    return path


def _commands(path: Path, out: Path) -> list[tuple[object, ...]]:
    return [
        ("inspect", path), ("disguise", path, "--out", out), ("compare", path, path),
        ("align", path, path, "--out", out), ("fingerprint", path),
    ]  # fmt: skip


def test_a_gelu_encoder_is_asked_about_and_then_disguised_rightly(
    file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "other.pt"
    for command in _commands(file, out):
        done = tnfn(*command)
        assert done.returncode == 2
        sentence, *lines = done.stderr.splitlines()
        for field in ("nhead", "norm_first", "activation"):
            assert f"--set {field}=" in sentence
        assert set(tomllib.loads("\n".join(lines))["config"]) == {
            "nhead", "norm_first", "activation"
        }  # fmt: skip
        assert not out.exists()
    shown = printed("disguise", file, "--out", out, *STATED)
    assert f"open it with the same options: {' '.join(STATED)}" in shown
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = encoder(norm_first=True, final=True, activation="gelu")
    expected = module(x).detach()
    module.load_state_dict(torch.load(out, weights_only=True))
    torch.testing.assert_close(module(x).detach(), expected, rtol=1e-10, atol=1e-10)
    printed("compare", file, out, "--prove", *STATED)
    aligned = tmp_path / "aligned.pt"
    shown = printed("align", out, file, "--out", aligned, *STATED)
    assert f"open it with the same options: {' '.join(STATED)}" in shown


def test_the_pasted_lines_are_an_architecture_file(file: Path, tmp_path: Path) -> None:
    lines = tnfn("inspect", file).stderr.splitlines()[1:]
    own = tmp_path / "own.toml"
    own.write_text("\n".join(lines).replace("= 8", "= 4"))
    printed("inspect", file, "--architecture", own)


BAD = {
    "a size of 0": (("--set", "nhead=0"), "size head (nhead) expected a whole number above 0"),
    "text for a size": (("--set", "nhead=x"), "expected a whole number above 0, found 'x'"),
    "not dividing the width": (("--set", "nhead=7"), "expected shape"),
    "an unknown activation": (("--set", "activation=foo"), "expected one of gelu, "),
    "no flag": (("--set", "norm_first=no"), "'norm_first' expected true or false, found 'no'"),
    "an unknown field": (("--set", "heads=4"), "--set heads: nn.TransformerEncoder has no such"),
    "a size's own name": (("--set", "D=24"), "expected one of nhead, "),
    "no value": (("--set", "nhead"), "--set expected FIELD=VALUE"),
    "an empty value": (("--set", "nhead="), "--set expected FIELD=VALUE"),
    "no field": (("--set", "=4"), "--set expected FIELD=VALUE"),
    "a list": (("--set", "nhead=[4]"), "expected a number, true, false or text"),
    "an unknown family": (("--family", "gpt5"), "--family expected one of albert, "),
    "another family": (("--family", "bert"), "lacks "),
    "two families": (("--family", "bert", "--architecture", "x.toml"), "both choose a family"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_every_command(
    case: str, file: Path, tmp_path: Path
) -> None:
    words, shown = BAD[case]
    fields = [word.split("=")[0] for word in words]
    rest = [
        word
        for flag, setting in zip(STATED[::2], STATED[1::2], strict=True)
        if setting.split("=")[0] not in fields and words[0] == "--set"
        for word in (flag, setting)
    ]
    for command in _commands(file, tmp_path / "out"):
        done = tnfn(*command, *words, *rest)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
        assert shown in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_field_is_stated_once_and_for_checkpoints_only(file: Path, tmp_path: Path) -> None:
    done = tnfn("inspect", file, "--set", "nhead=4", "--set", "nhead=8")
    assert (done.returncode, done.stderr) == (2, "error: --set states 'nhead' twice\n")
    assert_refused(
        "#0': --set nhead: Small Transformer Zoo has no such config field",
        "inspect",
        "mnist-sample#0",
        "--set",
        "nhead=4",
    )


def test_flags_may_be_written_as_python_writes_them(file: Path) -> None:
    words = ("--set", "nhead=4", "--set", "activation=relu", "--json")
    post = printed("inspect", file, *words, "--set", "norm_first=False")
    assert post == printed("inspect", file, *words, "--set", "norm_first=false")
    assert post != printed("inspect", file, *words, "--set", "norm_first=True")


def test_a_folder_of_encoders(file: Path, tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / name).write_bytes(file.read_bytes())
    out = tmp_path / "pairs.json"
    words = ("compare", "--matrix", tmp_path / "models", "--out", out)
    assert_refused("--set nhead=", *words)
    assert "1 same" in printed(*words, *STATED)
    before = out.read_text()
    printed(*words, "--set", "nhead=8", *STATED[2:])
    assert out.read_text() != before, "pairs read in another way are compared again"


def test_a_config_without_a_model_type_is_recognised_or_names_the_remedy(tmp_path: Path) -> None:
    for case in ("bert", "bert base"):
        folder = tmp_path / case
        tiny_checkpoints.save(case, folder)
        config = json.loads((folder / "config.json").read_text())
        kept = ("hidden_act", "num_attention_heads", "hidden_size", "layer_norm_eps")
        (folder / "config.json").write_text(json.dumps({field: config[field] for field in kept}))
    printed("inspect", tmp_path / "bert")
    assert_refused("--family bert or --family roberta", "inspect", tmp_path / "bert base")
    printed("inspect", tmp_path / "bert base", "--family", "bert")
