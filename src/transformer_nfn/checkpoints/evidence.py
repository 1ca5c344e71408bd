"""Exact permutation test of common ancestry, from the sketches of two models.

Null hypothesis: B was trained independently of A, from an initialisation whose neurons and heads
are exchangeable. Training commutes with a permutation of the units of a block, so under the null
(A, B) and (A, πB) have the same law for every π, and the index of a unit carries no information.
The statistic is the sum of the cosines of units with the same index, ``Σ cos(a_i, b_i)``.

What the test conditions on must not depend on the order of B's units. The map of the stream is
fitted on embeddings, positions and outputs; blocks are paired by scores, which match units
whatever their order. Both therefore keep the test exact.

Permutations. Any subgroup gives an exact test. Units are permuted within batches of four: the sum
then splits into independent terms of 24 equally likely values. A p-value comes from random
permutations, ``(1 + number at least as large) / (1 + DRAWS)``, which is exact at every level.
Where the observed sum exceeds all of them, Chernoff's bound takes over: the moment generating
function is a product of known factors, so ``P(T ≥ t) ≤ exp(K(λ) − λt)`` holds for every λ and
every sample size. Levels above ``1 / (1 + DRAWS)`` depend on the first alone and levels below on
the second alone, so the combination is valid too.

The units that may be permuted are the sites of the two permutation symmetries: blocks that share
a position bias share one permutation, and heads with grouped keys move in whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from transformer_nfn.checkpoints.sketches import Directions
from transformer_nfn.checkpoints.symmetries.attention import HeadPermutation
from transformer_nfn.checkpoints.symmetries.neurons import NeuronPermutation
from transformer_nfn.functional.description import Transformer

NULL = (
    "B was trained independently of A, from an initialisation whose neurons and heads are "
    "exchangeable"
)
BATCH, ORDERS = 4, 24
DRAWS = 999
"""Random permutations; the same for every pair."""
LARGEST = 25.0
"""Logarithm of the largest λ that is tried, in units of the inverse standard deviation."""

Terms = Sequence[Sequence[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Significance:
    """Outcome of a permutation test.

    Attributes:
        z: the statistic less its mean, in units of its standard deviation under the null.
        log10_p: of a p-value that is valid at every level.
    """

    z: float
    log10_p: float


@dataclass(frozen=True)
class ExactTest:
    """Outcome of the permutation test on two models, from `exact_test`.

    Attributes:
        total: of all blocks together.
        blocks: of each block of A with its partner in B. Heads whose order several blocks share
            count in the total alone.
        partners: block of B by block of A.

    >>> print(ExactTest(Significance(2.0, -1.6), {}, {}))  # doctest: +ELLIPSIS
    exact test: log10 p = -1.6 under the null hypothesis that B was trained independently ...
    """

    total: Significance
    blocks: Mapping[str, Significance]
    partners: Mapping[str, str]

    def __str__(self) -> str:
        return (
            f"exact test: log10 p = {self.total.log10_p:z.1f} under the null hypothesis that {NULL}"
        )

    def as_json(self) -> dict[str, object]:
        """Everything, as JSON values."""
        return {
            "null": NULL,
            "z": self.total.z,
            "log10_p": self.total.log10_p,
            "blocks": {
                name: {"partner": self.partners[name], "z": s.z, "log10_p": s.log10_p}
                for name, s in self.blocks.items()
            },
        }


def exact_test(
    pairs: Iterable[tuple[str, str, Directions, Directions]], B: Transformer
) -> ExactTest | None:
    """Test whether B was trained independently of A.

    Args:
        pairs: names of a block of A and of a block of B, and their sketches as unit vectors. Each
            block of B occurs at most once, paired by something that does not depend on the order
            of its units.
        B: description of the second model.

    Returns:
        None if no two units can be exchanged.
    """
    sites = _permuted_sites(B)
    tables: dict[int, Tensor] = {}
    holders: dict[int, set[str]] = {}
    partners = {}
    for first, second, a, b in pairs:
        partners[first] = second
        for tensor, terms in _units(a, b, _mlp_prefixes(sites, second)):
            if f"{second}.{tensor}" not in sites:
                continue
            site, groups = sites[f"{second}.{tensor}"]
            sums = permuted_sums([[_grouped(f, groups) for f in term] for term in terms])
            tables[site] = tables[site] + sums if site in tables else sums
            holders.setdefault(site, set()).add(first)
    # Each site counts alike, however many units it has.
    tables = {site: table for site, raw in tables.items() if (table := _standard(raw)) is not None}
    if not tables:
        return None
    draws = _drawn(tables)
    blocks = {}
    for name in partners:
        own = [site for site in tables if holders[site] == {name}]
        if own:
            blocks[name] = _significance([tables[s] for s in own], [draws[s] for s in own])
    total = _significance(list(tables.values()), list(draws.values()))
    return ExactTest(total, blocks, partners)


def permuted_sums(terms: Terms) -> Tensor:
    """Sums of cosines of each batch of units under each order of the second model's.

    Args:
        terms: each a list of factors, two matrices ``[n, d]`` of unit vectors; the similarity of
            two units is the sum over the terms of the product of their cosines.

    Returns:
        ``[batches, ORDERS]`` in float64; the order of the file comes first.

    Example:
        >>> units = torch.eye(4)
        >>> sums = permuted_sums([[(units, units)]])
        >>> sums.shape, sums[0, 0].item(), sums.mean().item()
        (torch.Size([1, 24]), 4.0, 1.0)
    """
    n = min(len(x) for term in terms for pair in term for x in pair)
    rest = n % BATCH
    out = [torch.zeros(0, ORDERS, dtype=torch.float64)]
    for start, stop, size in ((0, n - rest, BATCH), (n - rest, n, rest)):
        if stop == start or size < 2:
            continue
        cosines = torch.zeros((), dtype=torch.float64)
        for term in terms:
            product = torch.ones((), dtype=torch.float64)
            for pair in term:
                x, y = (z[start:stop].unflatten(0, (-1, size)) for z in pair)
                product = product * (x @ y.mT)
            cosines = cosines + product
        orders = torch.tensor(list(permutations(range(size))))
        sums = cosines[:, torch.arange(size), orders].sum(-1)
        out.append(sums.repeat(1, ORDERS // len(orders)))
    return torch.cat(out)


def _permuted_sites(model: Transformer) -> dict[str, tuple[int, int]]:
    """Number of the site at which the units of a writing matrix are permuted, and the number of
    groups that stay together (0 for neurons, which have none).

    The experts of a block are one site: they may be copies of one MLP, whose neurons have one order
    in all of them.
    """
    sites: dict[str, tuple[int, int]] = {}
    for site in HeadPermutation().sites(model):
        names = [name for name in site.names.values() if name.endswith("W_O")]
        sites |= dict.fromkeys(names, (len(sites), site.detail.groups))
    for site in NeuronPermutation().sites(model):
        if "W_B" in site.names:
            name = site.names["W_B"]
            first = name.partition(".expert.")[0] + ".expert.0.W_B"
            sites[name] = sites.get(first, (len(sites), 0))
    return sites


def _mlp_prefixes(sites: Iterable[str], block: str) -> list[str]:
    """What stands before the tensors of the MLPs of a block, or of its experts."""
    inside = [name.removeprefix(f"{block}.") for name in sites if name.startswith(f"{block}.")]
    return [name.removesuffix("W_B") for name in inside if name.endswith("W_B")]


def _units(
    a: Directions, b: Directions, prefixes: Sequence[str]
) -> Iterable[tuple[str, Terms]]:
    """Heads and neurons that both blocks have, by their writing matrix.

    Experts are paired by their numbers; with one MLP each of them.
    """
    for prefix in sorted(a.heads.keys() & b.heads.keys()):
        QK, VO, _ = zip(a.heads[prefix], b.heads[prefix], strict=True)
        yield f"{prefix}W_O", [[QK], [VO]]
    if len(a.written) == len(b.written):
        count = len(prefixes)
        for e, prefix in enumerate(prefixes):
            (x, *xs), (y, *ys) = (
                [z.chunk(count)[e] if len(z) == len(b.read) else z for z in (d.read, *d.written)]
                for d in (a, b)
            )
            yield f"{prefix}W_B", [[(x, y)], list(zip(xs, ys, strict=True))]


def _grouped(pair: tuple[Tensor, Tensor], groups: int) -> tuple[Tensor, Tensor]:
    """Heads as whole groups, one unit vector each; as they are where there is only one group."""
    if groups < 2:
        return pair
    share = len(pair[1]) // groups
    x, y = (
        z[: len(z) // share * share].unflatten(0, (-1, share)).flatten(1) / share**0.5 for z in pair
    )
    return x, y


def _standard(table: Tensor) -> Tensor | None:
    """Sums whose total has mean 0 and variance 1 under the null; None if they do not vary."""
    table = table - table.mean(1, keepdim=True)
    variance = float(table.square().mean(1).sum())
    return table / variance**0.5 if variance > 1e-20 else None


def _drawn(tables: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The statistic of each site under random permutations, ``[DRAWS]``."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for site, table in tables.items():
        drawn = torch.randint(ORDERS, (DRAWS, len(table)), generator=generator)
        drawn += ORDERS * torch.arange(len(table))
        out[site] = table.flatten()[drawn].sum(1)
    return out


def _significance(tables: Sequence[Tensor], draws: Sequence[Tensor]) -> Significance:
    table, drawn = torch.cat(list(tables)), torch.stack(list(draws)).sum(0)
    observed = float(table[:, 0].sum())
    larger = int((drawn >= observed - 1e-9).sum())  # ties count, whatever their rounding
    log10_p = math.log10((1 + larger) / (1 + DRAWS))
    if larger == 0:
        log10_p = min(log10_p, chernoff_bound(table) / math.log(10))
    return Significance(observed / len(tables) ** 0.5, log10_p)


def chernoff_bound(table: Tensor) -> float:
    """Natural logarithm of an upper bound on P(T ≥ t).

    Args:
        table: ``[batches, orders]``; T is a sum over batches of one value of each row, all equally
            likely, and t the sum of the first column.

    >>> coins = torch.tensor([[1.0, 0.0]]).expand(10, 2)
    >>> round(chernoff_bound(coins) / math.log(2), 6)  # ten heads in a row
    -10.0
    """
    from scipy.optimize import minimize_scalar  # slow to import

    excess = table.double() - table[:, :1]  # before it is scaled: λt would cancel

    def exponent(log_lambda: float) -> float:
        terms = torch.logsumexp(math.exp(log_lambda) * excess, 1) - math.log(table.shape[1])
        return float(terms.sum())

    found = minimize_scalar(exponent, bounds=(-LARGEST, LARGEST), method="bounded")
    return min(float(found.fun), 0.0)
