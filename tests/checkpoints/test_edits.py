"""Edits of single tensors in every family: what changes the function is never called the same."""

from collections.abc import Mapping

import pytest
import torch
from memory_model import MemoryModel, disguised
from torch import Tensor
from weight_edits import unseen_edits

from tiny_families import HEADS, QUICK, TINY, encoder, inputs_of
from transformer_nfn.checkpoints import OpenOptions, open_model, relate
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.functional.transformer import hidden_states, logits, pooled, transformer


def outputs_of(family: str, model: MemoryModel):
    """Function from tensors to logits, and to what a pooler gives."""
    first, *decoder = inputs_of(family).values()
    description = model.description

    def outputs(tensors: Mapping[str, Tensor]) -> Tensor:
        x = hidden_states(description, tensors, first, decoder=decoder[0] if decoder else None)
        out = [logits(description, tensors, x)]
        if "extra.pooler.W" in tensors:
            out.append(pooled(description, tensors, x))
        return torch.cat([y.flatten() for y in out])

    return outputs


@pytest.mark.parametrize("family", [*QUICK, "opt-post-norm"])
def test_edits_are_seen(tiny, family):
    """One in two hundred; one in fifteen in the nightly test."""
    model = tiny(family, torch.float64)
    assert unseen_edits(model, outputs_of(family, model), 200) == []


@pytest.mark.nightly
@pytest.mark.parametrize("family", TINY | HEADS)
@pytest.mark.parametrize(("one_in", "hidden"), [(15, False), (40, True)])
def test_edits_of_every_family_are_seen(tiny, family, one_in, hidden):
    model = tiny(family, torch.float64)
    assert unseen_edits(model, outputs_of(family, model), one_in, hidden=hidden) == []


@pytest.mark.parametrize(
    ("family", "name", "edit"),
    [
        ("opt-post-norm", "position", lambda w: w + 0.3),  # the first block reads the mean
        ("opt-post-norm", "0.W_Q", lambda w: w + 0.3),
        ("albert", "projection_bias", lambda w: w + 0.3),
        ("llama", "1.W_Q", lambda w: w[[1, 0, 2, 3]]),  # heads that share keys and values
        ("llama", "1.W_O", lambda w: w[[0, 1, 3, 2]]),
        ("esm", "1.contact", lambda w: w * 1.1),
    ],
)
def test_means_and_the_partners_of_heads_are_seen(tiny, family, name, edit):
    model = tiny(family)
    other = disguised(model.changed(**{name: edit(model.tensors[name])}), 1)
    comparison = compare_fingerprints(take_fingerprint(model), take_fingerprint(other))
    assert comparison.changed
    assert comparison.distance > 0
    assert relate(model, other).same_function is False


def test_a_bias_between_two_norms_is_seen(tmp_path):
    """PyTorch's post-norm encoder with a final norm: two norms one after the other."""
    module = encoder(norm_first=False, final=True, activation="gelu")
    torch.save(module.state_dict(), tmp_path / "encoder.pt")
    settings = {"nhead": 4, "norm_first": False, "activation": "gelu"}
    with open_model(tmp_path / "encoder.pt", OpenOptions(settings=settings)) as opened:
        model = MemoryModel.of(opened)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def outputs(tensors: Mapping[str, Tensor]) -> Tensor:
        return transformer(model.description, tensors, x)

    torch.testing.assert_close(outputs(model.tensors), module(x).detach(), rtol=1e-9, atol=1e-9)
    bias = model.tensors["2.norm_2.b"]
    for edited, same in ((1.2 * bias, False), (bias.roll(1), False), (bias + 0.3, True)):
        other = model.changed(**{"2.norm_2.b": edited})
        apart = (outputs(other.tensors) - outputs(model.tensors)).abs().max()
        assert bool(apart < 1e-9) is same
        assert relate(model, other).same_function is same
        comparison = compare_fingerprints(take_fingerprint(model), take_fingerprint(other))
        assert (not comparison.changed) is same
