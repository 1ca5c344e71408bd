"""One contract for every symmetry on every family: `sites, size, draw, act, fit, reduce`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_families import QUICK, TINY, ZOO, Network, network, nightly_but_quick
from transformer_nfn.checkpoints.symmetries import (
    SYMMETRIES,
    BranchConstant,
    CentredReaders,
    CentredWriters,
    EmbeddingShift,
    ExpertPermutation,
    HeadPermutation,
    KeyBias,
    NeuronScale,
    NormBias,
    NormGain,
    PositionBias,
    QueryKeyBasis,
    QueryKeyGains,
    QueryKeySigns,
    Site,
    StreamBasis,
    StreamMap,
    Symmetry,
    ValueBias,
)
from transformer_nfn.checkpoints.symmetries.attention import HeadOrder
from transformer_nfn.functional.description import Attention
from transformer_nfn.spaces.actions import ComplexScale, Drawing, Linear, Orthogonal

pytest.importorskip("transformers")

Weights = dict[str, Tensor]
HOLDS, BREAKS, STEP = 1e-9, 1e-4, 1e-5
every_symmetric_family = pytest.mark.parametrize(
    "family", [*nightly_but_quick(TINY), pytest.param(ZOO)]
)
LOOSE = ("readers + γ⁻¹vᵀ", "writers + u1ᵀ", "key bias shifted", "position bias shifted")
"""Each tensor of these is moved on its own (with the bias that takes it back)."""


def drawing(seed: int = 0) -> Drawing:
    return Drawing(torch.Generator().manual_seed(seed), condition=10.0)


def all_tensors(family: str) -> Weights:
    """The tensors of a tiny network, a tied output matrix under the name of a head."""
    net = network(family)
    return net.weights | ({"head": net.weights["token"].mT} if net.description.tied else {})


def change(family: str, moved: Weights) -> float:
    """How far outputs move; an output matrix that is tied is no tensor of the network's."""
    net = network(family)
    tied = {"head"} if net.description.tied else set()
    return net.change({name: w for name, w in moved.items() if name not in tied})


def first_sites(family: str) -> list[tuple[Symmetry[Any], Site]]:
    """Each symmetry at its first site and its last."""
    out = []
    for symmetry in SYMMETRIES:
        sites = list(symmetry.sites(network(family).description))
        out += [(symmetry, site) for site in {id(s): s for s in (*sites[:1], *sites[-1:])}.values()]
    return out


def distance(a: Weights, b: Weights) -> float:
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-9)) for n in b)


@pytest.mark.parametrize("family", [*TINY, ZOO])
def test_an_action_leaves_the_function_unchanged(family: str) -> None:
    for symmetry in SYMMETRIES:
        weights, how = all_tensors(family), drawing()
        changed: Weights = {}
        for site in symmetry.sites(network(family).description):
            own = site.pick(weights)
            changed |= site.put(symmetry.act(site, own, symmetry.draw(site, own, how)))
            weights |= changed
        before = all_tensors(family)
        assert not changed or any(not torch.equal(before[n], w) for n, w in changed.items())
        assert change(family, changed) < HOLDS, symmetry.name


@every_symmetric_family
def test_half_an_action_changes_the_function(family: str) -> None:
    for symmetry, site in first_sites(family):
        if symmetry.name in LOOSE:
            continue
        own = site.pick(all_tensors(family))
        moved = symmetry.act(site, own, symmetry.draw(site, own, drawing(1)))
        moved = {n: w for n, w in moved.items() if not torch.equal(w, own[n])}
        for name in _telling(symmetry, moved):
            half = site.put({n: w for n, w in moved.items() if n != name})
            assert change(family, half) > BREAKS, (symmetry.name, name)


def _telling(symmetry: Symmetry[Any], moved: Weights) -> list[str]:
    """Tensors that cannot be left behind."""
    if symmetry.name == "stream":
        return [name for name in moved if name.endswith(("W_Q", "W_O", "W_A", "W_B"))][:4]
    silent = ("b_K", "contact") if symmetry.name != "quarter turns of query/key pairs" else ()
    return [n for n in moved if n.rpartition(".")[2] not in silent and len(moved) > 1]


@every_symmetric_family
def test_a_fit_finds_the_element(family: str) -> None:
    for symmetry, site in first_sites(family):
        a = site.pick(all_tensors(family))
        b = a | symmetry.act(site, a, symmetry.draw(site, a, drawing(2)))
        assert distance(a | symmetry.act(site, a, symmetry.fit(site, a, b)), b) < 1e-8, (
            symmetry.name
        )


@every_symmetric_family
def test_the_reduced_form_is_constant_on_orbits(family: str) -> None:
    for symmetry, site in first_sites(family):
        if type(symmetry).reduce is Symmetry.reduce:
            continue
        a = site.pick(all_tensors(family))
        b = a | symmetry.act(site, a, symmetry.draw(site, a, drawing(3)))
        one, other = (w | symmetry.reduce(site, w) for w in (a, b))
        assert distance(one, other) < 1e-8, symmetry.name


@every_symmetric_family
def test_the_size_is_the_rank_of_the_action(family: str) -> None:
    """Fits to random small steps are projections onto the orbit: their rank is its dimension."""
    for symmetry, site in first_sites(family):
        size = symmetry.size(site).continuous
        if size > (70 if family in (*QUICK, ZOO) else 300):
            continue
        a = site.pick(all_tensors(family))
        still = symmetry.act(site, a, symmetry.fit(site, a, a))
        generator = torch.Generator().manual_seed(0)
        rows = []
        for _ in range(size + 3):
            b = {n: w + STEP * w.std() * _normal(w, generator) for n, w in a.items()}
            moved = symmetry.act(site, a, symmetry.fit(site, a, b))
            rows.append(torch.cat([(moved[n] - still[n]).flatten() / STEP for n in still]))
        values = torch.linalg.svdvals(torch.stack(rows))
        assert int((values > 1e-3 * max(float(values[0]), 1e-6)).sum()) == size, symmetry.name


def _normal(w: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(w.shape, generator=generator, dtype=w.dtype)


def at(symmetry: Symmetry[Any], net: Network, g: Any) -> Weights:
    """An element at the first site of a symmetry."""
    site = next(iter(symmetry.sites(net.description)))
    return site.put(symmetry.act(site, site.pick(net.weights), g))


def at_block(symmetry: Symmetry[Any], net: Network, g: Any, detail: Any = None) -> Weights:
    """An element on block 0, as if the symmetry had a site there."""
    prefix = f"{net.description.stacks[0].prefix}0."
    names = {n.removeprefix(prefix): n for n in net.weights if n.startswith(prefix)}
    site = Site(net.description, names, detail)
    return site.put(symmetry.act(site, site.pick(net.weights), g))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def signs_of(*shape: int) -> Tensor:
    """Signs of both kinds."""
    return torch.where(torch.arange(math.prod(shape)).reshape(shape) % 5 > 1, 1.0, -1.0).double()


def attention_of(net: Network) -> Attention:
    return net.description.stacks[0].blocks[0].attention


def heads_across_groups(net: Network) -> Weights:
    attention = attention_of(net)
    order = torch.arange(attention.heads).roll(1), torch.arange(attention.groups)
    return at(HeadPermutation(), net, HeadOrder(*order))


def heads_of_one_block(net: Network) -> Weights:
    order = torch.arange(attention_of(net).heads).roll(1)
    site = next(iter(HeadPermutation().sites(net.description)))
    own = {n: w for n, w in site.pick(net.weights).items() if ".1." in n}
    return site.put(HeadPermutation().act(site, own, HeadOrder(order, order)))


def heads_with_slopes(net: Network) -> Weights:
    order = torch.arange(attention_of(net).heads).roll(1)
    site = next(iter(ValueBias().sites(net.description)))
    moved = HeadPermutation().act(site, site.pick(net.weights), HeadOrder(order, order))
    return site.put(moved)


def neurons_across_experts(net: Network) -> Weights:
    out = {}
    for name in ("W_A", "W_G", "W_B"):
        both = [net.weights[f"0.expert.{e}.{name}"] for e in range(2)]
        rows = [z if name == "W_B" else z.mT for z in both]
        mixed = torch.cat([rows[1][:1], rows[0][1:]]), torch.cat([rows[0][:1], rows[1][1:]])
        for e, z in enumerate(mixed):
            out[f"0.expert.{e}.{name}"] = z if name == "W_B" else z.mT
    return out


def one_column_of_a_router(net: Network) -> Weights:
    shift = torch.zeros_like(net.weights["0.router"])
    shift[:, 0] = random(len(shift))
    return {"0.router": net.weights["0.router"] + shift}


def any_query_basis(net: Network) -> Weights:
    attention = attention_of(net)
    G = Linear().draw(attention.d_k, (attention.groups,), drawing())
    return at_block(QueryKeyBasis(), net, G, attention)


def neighbouring_pairs(net: Network) -> Weights:
    attention = attention_of(net)
    G = ComplexScale("neighbours").draw(attention.d_k, (attention.groups,), drawing())
    return at(QueryKeyBasis(), net, G)


def complex_scales(net: Network) -> Weights:
    attention = attention_of(net)
    G = ComplexScale("halves").draw(attention.d_k, (attention.groups,), drawing())
    return at_block(QueryKeyBasis(), net, G, attention)


def gain_into_rows(net: Network) -> Weights:
    gain = net.weights["0.q_norm.g"]
    W_Q = net.weights["0.W_Q"] * gain.unsqueeze(-2)
    return {"0.W_Q": W_Q, "0.q_norm.g": torch.ones_like(gain)}


def gains_of_one_head(net: Network) -> Weights:
    q, k = (net.weights[f"0.{p}_norm.g"].clone() for p in "qk")
    q[0] *= 2
    k[0] /= 2
    return {"0.q_norm.g": q, "0.k_norm.g": k}


def post_norm_gain(net: Network) -> Weights:
    site = next(iter(NormBias().sites(net.description)))
    return site.put(NormGain().act(site, site.pick(net.weights), 0.5 + random(32).abs()))


def readers_of_rms_norm(net: Network) -> Weights:
    site = next(iter(NormGain().sites(net.description)))
    shifts = {"W_Q": random(attention_of(net).heads, attention_of(net).d_k)}
    return site.put(CentredReaders().act(site, site.pick(net.weights), shifts))


def turned(net: Network, stream: StreamMap, but: str = "none") -> Weights:
    return {n: stream.tensor(n, w) for n, w in net.weights.items() if but not in n}


def any_rotation(net: Network) -> StreamMap:
    return StreamMap(matrix=Orthogonal().draw(net.description.width, (), drawing()))


CONTROLS: dict[str, tuple[tuple[str, ...], Callable[[Network], Weights]]] = {
    "queries across groups": (("llama", "qwen3", "gemma2", "olmoe"), heads_across_groups),
    "heads of one block that shares a position bias": (("t5", "t5-v1.1"), heads_of_one_block),
    "neurons across experts": (("mixtral", "qwen3-moe"), neurons_across_experts),
    "one column of a router": (("qwen3-moe", "mixtral"), one_column_of_a_router),
    "a bias that the first round does not read": (
        ("albert",), lambda n: {
            "0.norm_2.b": n.weights["0.norm_2.b"] + 1,
            "0.b_O": n.weights["0.b_O"] - 1,
            **{f"0.b_{p}": n.weights[f"0.b_{p}"] - n.weights[f"0.W_{p}"].sum(1) for p in "QKV"},
        },
    ),
    "scale of one expert": (
        ("mixtral",), lambda n: {"0.expert.0.W_B": 2 * n.weights["0.expert.0.W_B"]},
    ),
    "heads with a slope each": (("bloom",), heads_with_slopes),
    "any basis of rotary queries": (
        ("llama", "mistral", "phi", "neox", "esm", "gptj"), any_query_basis,
    ),
    "rotary pairs of neighbours": (("llama", "qwen2", "phi3"), neighbouring_pairs),
    "complex scales under a norm": (("qwen3", "olmoe"), complex_scales),
    "single signs under a norm": (("qwen3",), lambda n: at(QueryKeySigns(), n, signs_of(2, 12))),
    "single gains under a norm": (
        ("qwen3",), lambda n: at(QueryKeyGains(), n, signs_of(1, 12) + 2),
    ),
    "single gains under a norm over all heads": (
        ("olmoe",), lambda n: at(QueryKeyGains(), n, signs_of(2, 8) + 2),
    ),
    "gains of a norm into what it reads": (("olmoe", "qwen3"), gain_into_rows),
    "queries of one head under a norm over all": (
        ("olmoe",), lambda n: {"0.W_Q": n.weights["0.W_Q"] * (1 + torch.eye(4)[0])[:, None, None]},
    ),
    "gains of the queries of one head": (("olmoe",), gains_of_one_head),
    "key bias under rotary positions": (
        ("qwen2", "phi"), lambda n: at_block(KeyBias(), n, random(*n.weights["0.b_K"].shape)),
    ),
    "position bias by bucket": (
        ("t5",), lambda n: at(PositionBias(), n, random(8, 1)),
    ),
    "scales of GELU": (
        ("gpt2", "bert", "vit", "phi"), lambda n: at_block(NeuronScale(), n, random(1).abs() + 2),
    ),
    "negative scales of ReLU": (("opt", "t5"), lambda n: at(NeuronScale(), n, -torch.ones(1))),
    "gains in the residual": (("bert", "distilbert"), post_norm_gain),
    "readers of RMS norm": (("llama", "qwen3"), readers_of_rms_norm),
    "constant between branches in a row": (
        ("gpt2", "vit"), lambda n: at_block(BranchConstant(), n, random(32)),
    ),
    "signs of single coordinates under LayerNorm": (
        ("gpt2", "bert", "phi"), lambda n: turned(n, StreamMap(torch.arange(32), signs_of(32))),
    ),
    "a permutation of all but one block": (
        ("gpt2", "llama"),
        lambda n: turned(n, StreamMap(torch.arange(32).roll(1), torch.ones(32)), but="1."),
    ),
    "rotation without folded gains": (
        ("llama", "gpt2-untied"), lambda n: turned(n, any_rotation(n)),
    ),
    "rotation that moves the mean": (
        ("gpt2-untied", "neox"), lambda n: at(StreamBasis(), n, any_rotation(n)),
    ),
    "rotation of the stream to which positions are added": (
        (ZOO,), lambda n: turned(n, any_rotation(n), but="1."),
    ),
    "rotation of a tied stream": (("llama-tied", "gemma2"), lambda n: turned(n, any_rotation(n))),
    "the stream of audio without its convolutions": (
        ("whisper",), lambda n: turned(n, StreamMap(torch.arange(32).roll(1), torch.ones(32))),
    ),
    "rotation of a stream that a norm begins": (
        ("bloom",), lambda n: turned(n, any_rotation(n)),
    ),
}  # fmt: skip
CONTROL_CASES = [
    pytest.param(name, family, marks=() if i == 0 else pytest.mark.nightly)
    for name, (families, _) in CONTROLS.items()
    for i, family in enumerate(families)
]


@pytest.mark.parametrize(("name", "family"), CONTROL_CASES)
def test_what_is_nearly_a_symmetry_changes_the_function(name: str, family: str) -> None:
    assert network(family).change(CONTROLS[name][1](network(family))) > 1e-2


@pytest.mark.parametrize(("family", "symmetry"), [
    ("llama", KeyBias()), ("llama", ValueBias()), ("llama", CentredReaders()),
    ("llama", CentredWriters()), ("qwen2", KeyBias()), ("qwen2", ValueBias()),
    ("qwen3", QueryKeyBasis()), ("gpt2", NeuronScale()), ("gpt2", BranchConstant()),
    ("gpt2", EmbeddingShift()), ("gpt2-base", StreamBasis()), ("bloom", HeadPermutation()),
    ("llama", ExpertPermutation()), ("esm", KeyBias()), ("gptj", ValueBias()),
    ("whisper", KeyBias()), ("marian", StreamBasis()),
    ("olmoe", QueryKeyBasis()),
])  # fmt: skip
def test_where_a_symmetry_does_not_hold_it_has_no_site(
    family: str, symmetry: Symmetry[Any]
) -> None:
    assert not list(symmetry.sites(network(family).description))
