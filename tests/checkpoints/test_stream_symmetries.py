"""Every symmetry between blocks, family by family: it holds, and what is nearly it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from family_rows import (
    ALL,
    BREAKS,
    GROUPED,
    HOLDS,
    LEARNED,
    PARTIAL,
    POST,
    T5,
    Weights,
    acted,
    drawing,
    row,
)
from torch import Tensor

from tiny_families import Network, network
from transformer_nfn.checkpoints.disguises import Turn, draw_turn, norms, untied
from transformer_nfn.checkpoints.disguises.ends import (
    EMBEDDINGS,
    MLM,
    last_reading,
    move_patches,
    move_to_positions,
)
from transformer_nfn.checkpoints.disguises.sites import end_names, sites
from transformer_nfn.checkpoints.disguises.whole import MEMORY
from transformer_nfn.checkpoints.families import Transformer
from transformer_nfn.spaces.actions.matrix import orthogonal

pytest.importorskip("transformers")

LAYER = (*LEARNED, *PARTIAL)
RMS = (*GROUPED, *T5)
UNTIED_RMS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "t5-v1.1")
UNTIED_LAYER = ("gpt2-untied", "vit", "deit", *PARTIAL)
Moved = tuple[Weights, Transformer | None]
Act = Callable[[Network], Moved]


def with_head(net: Network) -> Weights:
    """All tensors, the output matrix of a tied network too."""
    if not net.about.tied:
        return dict(net.weights)
    return {**net.weights, "head": net.weights["token"].mT * net.about.head_scale}


def turned(net: Network, turn: Turn, *, skip: str = "none") -> Weights:
    return {n: w if n.startswith(skip) else turn(n, w) for n, w in net.weights.items()}


def permuted(net: Network) -> Moved:
    return turned(net, draw_turn("permutation and sign", net.about.width, drawing(2))), None


def permuted_but_one_block(net: Network) -> Moved:
    turn = draw_turn("permutation and sign", net.about.width, drawing(2))
    return turned(net, turn, skip=f"{net.about.stacks[0].prefix}1."), None


def all_signs(net: Network) -> Turn:
    return Turn(order=torch.arange(net.about.width), signs=-torch.ones(net.about.width).double())


def flipped(net: Network) -> Moved:
    return turned(net, all_signs(net)), None


def flipped_without_biases(net: Network) -> Moved:
    out = turned(net, all_signs(net))
    return out | {n: w for n, w in net.weights.items() if "norm" in n and n.endswith(".b")}, None


def signed(net: Network) -> Moved:
    return turned(net, draw_turn("signed permutation", net.about.width, drawing(1))), None


def folded(net: Network, weights: Weights, about: Transformer) -> Weights:
    """All gains of one, their readers scaled instead; a tied last one stays as it is."""
    out = dict(weights)

    def fold(names: dict[str, str], readings: tuple[norms.Reading, ...]) -> None:
        own = {short: out[name] for short, name in names.items() if name in out}
        for reading in readings:
            gain = own.get(f"{reading.norm}.g")
            if gain is not None:
                own |= norms.replace_gain(own, reading, torch.ones_like(gain))
        out.update({names[short]: w for short, w in own.items()})

    for site in sites(about):
        names, readings = dict(site.names), norms.readings(site.block, site.names)
        if site.block.cross is not None:
            own = {short: out[name] for short, name in names.items()}
            own["memory.g"] = net.weights["encoder.norm.g"]
            changed = norms.replace_gain(own, MEMORY, torch.ones(about.width).double())
            out |= {names[k]: w for k, w in changed.items() if k in names}
        fold(names, readings)
    last = last_reading(about)
    fold(end_names(about), () if last is None or about.tied else (last,))
    if "encoder.norm.g" in out:
        out["encoder.norm.g"] = torch.ones(about.width).double()
    return out


def rotated(net: Network, matrix: Tensor, *, fold: bool = True, untie: bool = True) -> Moved:
    about = untied(net.about) if untie else net.about
    weights = with_head(net) if untie else dict(net.weights)
    out = folded(net, weights, about) if fold else weights
    turn = Turn(matrix=matrix)
    return {name: turn(name, w) for name, w in out.items()}, about


def any_rotation(net: Network) -> Tensor:
    return orthogonal(1, net.about.width, drawing(3))[0]


def fixing_ones(net: Network) -> Tensor:
    turn = draw_turn("orthogonal fixing ones", net.about.width, drawing(3))
    assert turn.matrix is not None
    torch.testing.assert_close(turn.matrix.sum(0), torch.ones(net.about.width).double())
    torch.testing.assert_close(turn.matrix @ turn.matrix.mT, torch.eye(net.about.width).double())
    return turn.matrix


def two_rotations(net: Network) -> Moved:
    first, about = rotated(net, any_rotation(net))
    second, _ = rotated(net, orthogonal(1, net.about.width, drawing(4))[0])
    return first | {n: w for n, w in second.items() if n.startswith("encoder.")}, about


def rescaled(net: Network, *, eps: bool) -> Moved:
    """A stream a thousand times smaller, with the norms' ε or without."""
    c = 1e-3
    writers = ("W_O", "b_O", "W_B", "b_B", "token")
    out = {n: w * c if n.split(".")[-1] in writers else w for n, w in net.weights.items()}
    return out, replace(net.about, eps=net.about.eps * c**2) if eps else None


def last_gain(net: Network, *, forget: str = "none") -> Moved:
    """The last norm's gain into what reads it."""
    about, weights = untied(net.about), with_head(net)
    names, reading = end_names(about), last_reading(about)
    assert reading is not None
    gain = torch.linspace(0.5, 2, about.width).double()
    own = {short: weights[name] for short, name in names.items()}
    changed = norms.replace_gain(own, reading, gain)
    return weights | {names[k]: w for k, w in changed.items() if not k.endswith(forget)}, about


def tied_gain(net: Network) -> Moved:
    """The last norm's gain into a tied output matrix, and so into the embedding."""
    weights, _ = last_gain(net)
    weights["token"] = weights.pop("head").mT / net.about.head_scale
    return weights, None


def encoder_gain(net: Network, *, forget: str = "none") -> Moved:
    gain = torch.linspace(0.5, 2, net.about.width).double()
    out = {**net.weights, "encoder.norm.g": gain}
    for name in out:
        if name.endswith(("cross.W_K", "cross.W_V")) and not name.endswith(forget):
            out[name] = out[name] * (net.weights["encoder.norm.g"] / gain).unsqueeze(-1)
    return out, None


def centred(net: Network, *, tied: bool = False) -> Moved:
    """A multiple of all ones on everything that is written."""
    how = drawing(5)
    about, weights = (net.about, dict(net.weights)) if tied else (untied(net.about), with_head(net))
    out = acted(net, row("writers + u1ᵀ"))
    shifts = {
        n: torch.randn(weights[n].shape[:-1], generator=how.generator).double()
        for n in EMBEDDINGS
        if n in weights
    }
    return {**weights, **out, **norms.shift_writers(weights, shifts)}, about


def added_ones(net: Network) -> Moved:
    """The same, where no LayerNorm takes it away."""
    return {
        name: w + 0.5 * w.std() if name.split(".")[-1] in ("W_O", "W_B") else w
        for name, w in net.weights.items()
    }, None


def vectors(net: Network, *, forget: str = "none", untie: bool = True) -> Moved:
    """Vectors between token, position and type; between first tokens, patches and positions."""
    about = untied(net.about) if untie else net.about
    weights = with_head(net) if untie else dict(net.weights)
    how = drawing(6)
    chosen = torch.randn((2, about.width), generator=how.generator).double()
    if about.inputs == "patches":
        out = move_patches(weights, chosen)
    else:
        sources = [name for name in ("token", "type") if name in weights]
        out = move_to_positions(weights, dict(zip(sources, chosen, strict=False)))
    return weights | {n: w for n, w in out.items() if n != forget}, about


def transform(net: Network, *, forget: str = "none") -> Moved:
    """The gain of the norm after BERT's transform into the output matrix."""
    weights, gain = with_head(net), torch.linspace(-2, 2, net.about.width).double()
    out = norms.replace_gain(weights, MLM, gain)
    return weights | {n: w for n, w in out.items() if n != forget}, untied(net.about)


Rows = dict[str, tuple[tuple[str, ...], Act | None, Act | None]]
ROWS: Rows = {
    "one permutation": ((*ALL, "gpt2-untied", "llama-tied"), permuted, permuted_but_one_block),
    "sign of the stream": (LAYER, flipped, flipped_without_biases),
    "signed permutation under RMS norm": (RMS, signed, None),
    "signed permutation under LayerNorm": (LAYER, None, signed),
    "O(D), gains folded": (
        UNTIED_RMS, lambda n: rotated(n, any_rotation(n)),
        lambda n: rotated(n, any_rotation(n), fold=False),
    ),
    "O(D), untied": (
        ("llama-tied", "t5"), lambda n: rotated(n, any_rotation(n)),
        lambda n: rotated(n, any_rotation(n), untie=False),
    ),
    "O(D), norms after the sublayers": (("gemma2",), None, lambda n: rotated(n, any_rotation(n))),
    "O(D) that fixes ones": (
        (*UNTIED_LAYER, "gpt2", "opt"), lambda n: rotated(n, fixing_ones(n)),
        lambda n: rotated(n, any_rotation(n)),
    ),
    "O(D) that fixes ones, tied": (
        ("gpt2", "opt"), None, lambda n: rotated(n, fixing_ones(n), untie=False),
    ),
    "O(D), one for encoder and decoder": (
        T5, lambda n: rotated(n, any_rotation(n)), two_rotations,
    ),
    "O(D) of a post-norm stream": (POST, None, lambda n: rotated(n, fixing_ones(n))),
    "scale of the stream with ε": (
        ("llama", "mistral", "phi3", "qwen2", "t5-v1.1"), lambda n: rescaled(n, eps=True),
        lambda n: rescaled(n, eps=False),
    ),
    "last gain": (
        (*UNTIED_LAYER, *UNTIED_RMS, "gpt2", "opt", "gemma2", "t5"), last_gain,
        lambda n: last_gain(n, forget="head"),
    ),
    "last gain, tied": (("gpt2", "opt", "llama-tied", "gemma2", "t5"), None, tied_gain),
    "last gain of a post-norm stream": (POST, last_gain, lambda n: last_gain(n, forget="mlm.W")),
    "gain after an encoder": (T5, encoder_gain, lambda n: encoder_gain(n, forget="W_V")),
    "gain after a transform": (POST, transform, lambda n: transform(n, forget="head")),
    "writers and centring": ((*LAYER, "gpt2-untied"), centred, None),
    "writers and centring, tied embedding": (
        ("gpt2", "opt", *POST), None, lambda n: centred(n, tied=True),
    ),
    "writers and centring under RMS norm": (RMS, None, added_ones),
    "vectors between embeddings": (LEARNED, vectors, lambda n: vectors(n, forget="position")),
    "vectors between embeddings, tied": (
        ("gpt2", "opt", *POST), None, lambda n: vectors(n, untie=False),
    ),
}  # fmt: skip
CASES = [
    pytest.param(family, *acts, id=f"{name}: {family}")
    for name, (families, *acts) in ROWS.items()
    for family in families
]


@pytest.mark.parametrize(("family", "holds", "breaks"), CASES)
def test_row(family: str, holds: Act | None, breaks: Act | None) -> None:
    net = network(family)
    if holds is not None:
        assert net.change(*holds(net)) < HOLDS
    if breaks is not None:
        assert net.change(*breaks(net)) > BREAKS


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_tied_stream_turns_if_the_last_gain_is_one_number(family: str) -> None:
    gain = torch.full_like(network(family).weights["norm.g"], 2)
    net = replace(network(family), weights={**network(family).weights, "norm.g": gain})
    before = net.outputs(net.weights)
    after = net.outputs(*rotated(net, fixing_ones(net), untie=False))
    assert float((after - before).abs().max() / before.abs().max()) < HOLDS
