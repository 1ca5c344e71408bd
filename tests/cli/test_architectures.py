"""`tnfn architectures` lists what can be read, and checks a data file of one's own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from transformer_nfn.checkpoints.families import families
from transformer_nfn.cli.app import app
from transformer_nfn.cli.console import explain_errors


def test_the_table_and_the_json_hold_every_family() -> None:
    shown = CliRunner().invoke(app, ["architectures"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    said = json.loads(CliRunner().invoke(app, ["architectures", "--json"]).output)
    assert said.keys() == families().keys()
    for name, family in families().items():
        assert family.title in shown.output
        assert family.reads in shown.output
        assert said[name]["model_types"] == list(family.model_types)
    assert said["gpt2"]["tensors"]["wte.weight"] == "token: vocab D"


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "llama"\ntitle = "Mine"\nmodel_types = ["mine"]\n')
    shown = CliRunner().invoke(app, ["architectures", "--architecture", str(path), "--json"])
    assert json.loads(shown.output)["mine"]["title"] == "Mine"
    path.write_text("title =")
    with pytest.raises(SystemExit) as caught:
        explain_errors(lambda: app(["architectures", "--architecture", str(path)]))
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: '{path}' is no data file")
