"""The commands as a user runs them: files in, files out, exit codes, one-sentence errors."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.networks import read_network, save_network

SPACE, OTHER = "attention_block:8,2,3,4,10", "attention_block:8,2,3,4,11"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("networks")
    for out, seed in (("a", 0), ("b", 1)):
        printed("sample", SPACE, "--out", path / f"{out}.safetensors", "--seed", seed)
    printed("disguise", path / "a.safetensors", "--out", path / "disguised.safetensors")
    return path


def test_compare_tells_by_exit_code_and_json(folder):
    answer = as_json("compare", folder / "a.safetensors", folder / "disguised.safetensors")
    assert answer["same_function"] is True
    assert answer["same_orbit"] is True
    other = printed("compare", folder / "a.safetensors", folder / "b.safetensors", "--json", code=1)
    assert json.loads(other)["witness"]["difference"] > 0.01
    words = tnfn("compare", folder / "a.safetensors", folder / "b.safetensors")
    assert "same function: no" in words.stdout


def test_fingerprints_and_canonical_forms_of_disguises_agree(folder):
    names = [folder / f"{n}.safetensors" for n in ("a", "disguised", "b")]
    done = tnfn("fingerprint", *names, "--json")
    apart = json.loads(done.stdout)["relative_distances"]
    assert apart[0][1] < 1e-4 < 1e-2 < apart[0][2]
    assert "distance to the first" in printed("fingerprint", *names)
    forms = []
    for name in names[:2]:
        out = folder / f"canonical-{name.name}"
        printed("canonical", name, "--out", out)
        forms.append(read_network(out)[1])
    for tensor in forms[0]:
        assert torch.allclose(forms[0][tensor], forms[1][tensor], atol=1e-3)


def test_space_prints_lists_and_writes_json(tmp_path):
    assert "head input qk*" in printed("space", SPACE)
    assert "rope_block" in printed("space")
    assert "grouped_query_block" in as_json("space")
    path = tmp_path / "space.json"
    path.write_text(tnfn("space", "residual_stack:2,8,2,3,4,10,5,3", "--json").stdout)
    assert "residual_stack: 30 tensors" in printed("space", path)


def test_bad_input_is_one_sentence_and_exit_code_2(folder):
    a, torn, plain, rope = (folder / f"{n}.safetensors" for n in ("a", "torn", "plain", "rope"))
    torn.write_bytes(a.read_bytes()[:-7])
    save_file({"W": torch.ones(3)}, plain)
    printed("sample", "rope_block:8,2,4,4,10", "--out", rope)
    for message, *words in (
        ("there is no file", "compare", a, folder / "none"),
        ("torn.safetensors' is not a readable safetensors file", "compare", a, torn),
        ("does not say which weight space", "compare", a, plain),
        ("'W_A' axis 'neuron': expected 11, found 10", "compare", a, a, "--space", OTHER),
        ("the spaces do not match", "compare", a, rope),
        ("neither a file nor a ready space", "space", "nothing:1"),
        ("expected attention_block:D,heads,Dk,Dv,Dff", "space", "attention_block:8,2"),
        ("must be whole numbers", "space", "attention_block:8,two"),
        ("--group must be", "compare", a, a, "--group", "all"),
        ("cannot be written", "canonical", a, "--out", "/proc/none/x"),
    ):
        assert_refused(message, *words)


def test_a_network_round_trips_bit_for_bit(tmp_path):
    space = spaces.biased_block(6, 2, 3, 2, 5)
    weights = space.randn(1, dtype=torch.bfloat16)
    save_network(tmp_path / "n.safetensors", space, weights)
    found, again = read_network(tmp_path / "n.safetensors")
    assert found == space
    assert all(torch.equal(again[n], weights[n]) for n in weights)
    with pytest.raises(SpaceError, match="a file holds one network"):
        save_network(tmp_path / "many.safetensors", space, space.randn(2))
    assert [p.name for p in tmp_path.iterdir()] == ["n.safetensors"]


def test_the_installed_command_exits_with_2():
    command = [sys.executable, "-m", "transformer_nfn", "compare", "none", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no file 'none'\n"
