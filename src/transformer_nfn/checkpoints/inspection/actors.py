"""What acts on a transformer without changing its function, and how large is that group?

The rows are those of `symmetry.disguise`, under the same names; here each is counted: its
continuous parameters, and the logarithm of how many permutations and signs it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformer_nfn.checkpoints.disguises import norms
from transformer_nfn.checkpoints.disguises.ends import EMBEDDINGS, MLM, last_reading
from transformer_nfn.checkpoints.disguises.neurons import scaling
from transformer_nfn.checkpoints.disguises.sites import Site, end_names, sites
from transformer_nfn.checkpoints.disguises.stream import stream_action
from transformer_nfn.functional.description import EXTRA, Attention, Transformer
from transformer_nfn.spaces import WeightSpace

LOG_2 = math.log10(2.0)


@dataclass(frozen=True)
class Acting:
    """One symmetry of a network.

    Attributes:
        name: what acts.
        times: at how many places.
        continuous: parameters of all of them together.
        finite: log10 of the number of permutations and signs of all of them together.
    """

    name: str
    times: int
    continuous: int
    finite: float


def acting(about: Transformer) -> tuple[Acting, ...]:
    """Every symmetry of a network as its file stands (a tied output matrix stays tied).

    Gains near zero, through which some of these cannot act, are a matter of the weights and not
    looked at here.
    """
    found: dict[str, Acting] = {}
    for name, continuous, finite in _rows(about):
        old = found.get(name, Acting(name, 0, 0, 0.0))
        found[name] = Acting(name, old.times + 1, old.continuous + continuous, old.finite + finite)
    return tuple(found.values())


def acting_on_space(space: WeightSpace) -> tuple[Acting, ...]:
    """The same for a weight space of this library's: one row per axis on which something acts."""
    out = []
    for name, axis in space.axes.items():
        sites_ = math.prod(space.axes[a].size for a in space.ancestors(name))
        if axis.kind == "perm":
            finite = sites_ * log10_factorial(axis.size)
            out.append(Acting(f"{name}: permuted", sites_, 0, finite))
        elif axis.kind != "free":
            whole = axis.kind == "linear" and axis.form == "general"
            count = sites_ * (axis.size**2 if whole else axis.size)
            out.append(Acting(f"{name}: {axis.kind}", sites_, count, 0.0))
    return tuple(out)


def log10_factorial(n: int) -> float:
    """log10 of n!."""
    return math.lgamma(n + 1) / math.log(10)


Row = tuple[str, int, float]


def _rows(about: Transformer) -> Iterator[Row]:
    yield from _stream(about)
    shared: set[str] = set()
    for site in sites(about):
        yield from _norms(site)
        for part, attention in _attentions(site):
            if part or not attention.position_bias:
                yield "heads permuted", 0, _head_orders(attention)
            elif site.stack.prefix not in shared:
                shared.add(site.stack.prefix)
                yield "heads permuted, all blocks alike", 0, _head_orders(attention)
            yield from _queries(attention)
            yield "values and outputs re-based", attention.groups * attention.d_v**2, 0.0
        yield from _biases(site)
        neurons = site.block.mlp.neurons
        yield "neurons permuted", 0, log10_factorial(neurons)
        kind = scaling(site.block.mlp)
        if kind is not None:
            yield "neurons scaled", neurons, neurons * LOG_2 if kind == "nonzero" else 0.0
    yield from _ends(about)


def _stream(about: Transformer) -> Iterator[Row]:
    action, D = stream_action(about), about.width
    if action == "none":
        return
    name = f"stream: {action}"
    if action == "orthogonal":
        yield name, D * (D - 1) // 2, LOG_2
    elif action == "orthogonal fixing ones":
        yield name, (D - 1) * (D - 2) // 2, LOG_2
    else:
        signs = D if action == "signed permutation" else 1
        yield name, 0, log10_factorial(D) + signs * LOG_2


def _attentions(site: Site) -> Iterator[tuple[str, Attention]]:
    yield "", site.block.attention
    if site.block.cross is not None:
        yield "cross.", site.block.cross


def _head_orders(about: Attention) -> float:
    share = about.heads // about.groups
    return log10_factorial(about.groups) + about.groups * log10_factorial(share)


def _queries(about: Attention) -> Iterator[Row]:
    plain = about.d_k - about.rotary
    pairs = about.rotary // 2
    if not about.qk_norm:
        yield "queries and keys re-based", about.groups * (about.rotary + plain**2), 0.0
        return
    yield "signs of query/key pairs", 0, about.groups * (pairs + plain) * LOG_2
    yield "gains of query and key norm", pairs + plain, (pairs + plain) * LOG_2
    yield "quarter turns of query/key pairs", 0, pairs * LOG_2
    yield "signs against gains of query and key norm", 0, 2 * about.d_k * LOG_2


def _norms(site: Site) -> Iterator[Row]:
    D, names, about = site.about.width, site.names, site.about
    for reading in norms.readings(site.block, names):
        if f"{reading.norm}.g" not in names:
            continue
        if reading.residual is None:
            yield "norm gains into readers", D, 0.0
        if reading.biased(names):
            yield "norm biases into readers' biases", D, 0.0
        if about.norm == "layer":
            columns = _columns(about, reading, names)
            if columns:
                yield "readers + γ⁻¹vᵀ", columns, 0.0
    if about.hides_mean:
        writers = [n for n in ("W_O", "b_O", "W_B", "b_B") if n in names]
        count = sum(math.prod(about.tensors[names[n]][:-1]) for n in writers)
        yield "writers + u1ᵀ", count, 0.0
    for norm in ("after_1", "after_2"):
        if f"{norm}.g" in names:
            yield "signs against gains after sublayers", 0, D * LOG_2


def _columns(about: Transformer, reading: norms.Reading, names: Mapping[str, str]) -> int:
    """Columns of the readers that may take a multiple of γ⁻¹."""
    biased = f"{reading.norm}.b" in names
    total = 0
    for reader in reading.present(names):
        if not biased or norms.bias_of(reader) in names:
            shape = about.tensors[names[reader]]
            total += math.prod(shape) // about.width
    return total


def _biases(site: Site) -> Iterator[Row]:
    about, names = site.block.attention, site.names
    free = about.d_k - about.rotary
    if "b_K" in names and not about.qk_norm and about.softcap is None and free:
        yield "key bias shifted", about.groups * free, 0.0
    if "b_V" in names and "b_O" in names:
        yield "value bias into output bias", about.groups * about.d_v, 0.0
    if "bias_table" in names:
        yield "position bias shifted", about.heads, 0.0
    if site.block.order == "parallel" and "b_O" in names and "b_B" in names:
        yield "constant between parallel branches", site.about.width, 0.0


def _ends(about: Transformer) -> Iterator[Row]:
    names = end_names(about)
    if about.tied:
        names = {**names, "head": "token"}  # shapes are the other way round, of no matter here
    last = last_reading(about)
    if last is not None and "norm.g" in names:
        yield from _end_norm(about, last, names, tied=about.tied and about.mlm is None)
    if about.mlm is not None and "head" in names:
        if not about.tied:
            yield "neurons permuted", 0, log10_factorial(about.tensors["extra.mlm.b"][0])
        yield from _end_norm(about, MLM, names, tied=about.tied)
    if about.hides_mean_of_embeddings:
        free = [n for n in EMBEDDINGS if n in names and not (n == "token" and about.tied)]
        yield "writers + u1ᵀ", sum(math.prod(about.tensors[names[n]][:-1]) for n in free), 0.0
    yield from _moved_vectors(about, names)
    if len(about.stacks) > 1:
        yield "norm gains into readers", about.width, 0.0


def _end_norm(
    about: Transformer, reading: norms.Reading, names: Mapping[str, str], *, tied: bool
) -> Iterator[Row]:
    D = about.width if reading.norm == "norm" else about.tensors[f"{EXTRA}mlm.b"][0]
    if not tied:
        yield "norm gains into readers", D, 0.0
    if reading.biased(names):
        yield "norm biases into readers' biases", D, 0.0
    if not tied and about.norm == "layer":
        columns = _columns(about, reading, names)
        if columns:
            yield "readers + γ⁻¹vᵀ", columns, 0.0


def _moved_vectors(about: Transformer, names: Mapping[str, str]) -> Iterator[Row]:
    if "position" not in names:
        return
    name = "vectors between embeddings"
    if about.inputs == "patches":
        yield name, about.width * (1 + ("patch_bias" in names)), 0.0
        return
    others = [n for n in ("token", "type") if n in names and not (n == "token" and about.tied)]
    if others:
        yield name, about.width * len(others), 0.0
