"""Layers over a whole network of any width, number of heads and depth: parameters by role.

The units of every width axis are nodes: each stream between two sublayers, neurons, hidden units of
the classifier, heads. Classes, pixels and places are nodes too, fixed ones, each with features of
its own; places reach the first stream through the positions, a constant that carries its axis.
Edges are the matrices of the normal form, sublayer by sublayer.

**Exact.** Permuting heads, neurons, hidden units or any stream (the first one together with the
positions) permutes the nodes and nothing else. Invertible matrices inside QK and VO, positive
scales of ReLU neurons, and scales and means that LayerNorm discards change nothing.

**Not complete.** The normal form is complete for the scales, means and matrices named: it loses
nothing else (logits up to a common number). The layers above it are not: they are not all
equivariant maps, linear or not, and as message passing they cannot tell apart all networks that no
permutation joins. Nor do they know that LayerNorm without gains also lets *rotations* of a stream
pass that keep the ones vector; independent training does not make such copies.

**Edges.** Each sublayer is one matrix around its units: the rows are the units inside it, the
columns the units on both of its sides. So few large products carry all messages.

- attention: rows the stream it reads, columns that stream (QK) and the one it writes (VO), by head;
- mlp: rows its neurons, columns the stream it reads (W_Aᵀ) and the one it writes (W_B);
- classifier: rows its hidden units, columns the last stream (W_1ᵀ) and the classes (W_2);
- inputs: rows pixels, their bias and places, columns the first stream (embedding and positions).

Messages run along two functions of the entries, and each unit starts from statistics of its row or
column in each matrix.

**Messages.** With entries ``w`` (head ``a``, unit ``i`` inside, unit ``j`` on side ``s``) and
functions ``f_k``

    to side s:  m_j = Θ_s Σ_a Σ_k Σ_i f_k(w_aij) · (g_ak ⊙ Φ_k x_i) / (h √I)
    to inside:  m_i = Σ_k Φ'_k Σ_a g'_ak ⊙ (Σ_s Σ_j f_k(w_aij) Θ'_s x_j) / (h √J)

where the matrices Θ and Φ are the same for all units, heads and blocks, the gates g are made from
the features of head a (there are none without heads), and J counts the units of all sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import sinusoids
from transformer_nfn.models.whole_network.invariants import NormalForm, evenly_sized, normal_form

ROLES = ("streams", "middle_streams", "neurons", "hidden", "classes", "heads")
SIDES = {"inputs": 1, "attention": 2, "mlp": 2, "classifier": 2}
POOLED = 11
"""Pools of nodes in the output: three of streams, two for each role of blocks, two others."""
KNEE = 0.04
"""The second function is 5 w for weights far smaller than this, and a signed root for larger."""

FUNCTIONS = 2
STATISTICS = 4
HEAD_STATISTICS = 2 * STATISTICS


@dataclass(frozen=True)
class Edges:
    """The matrices of one sublayer in all blocks side by side; b is networks times blocks.

    Attributes:
        values: ``[b, h, 2, I, J]``, for each head (one where there are none) both functions; the
            columns of all sides one after the other.
        sizes: how many columns each side has.
        rows: statistics of each row in each side, ``[b, h, I, 4 · sides]``.
        columns: for each side statistics of each column, ``[b, h, J, 4]``.
    """

    values: Tensor
    sizes: tuple[int, ...]
    rows: Tensor
    columns: tuple[Tensor, ...]


def edges_of(form: NormalForm) -> dict[str, Edges]:
    """The edges of a network, by sublayer; its positions must be known."""
    form = evenly_sized(form)
    assert form.positions is not None
    inputs = [x for x in (form.embedding, form.positions) if x is not None]
    return {
        "inputs": _inputs([x.unsqueeze(1) for x in inputs]),
        "attention": _edges([form.QK.flatten(0, 1), form.VO.flatten(0, 1)]),
        "mlp": _edges([x.flatten(0, 1).unsqueeze(1) for x in (form.A.mT, form.B)]),
        "classifier": _edges([x.unsqueeze(1) for x in (form.W_1.mT, form.W_2)]),
    }


def head_statistics(edges: Edges) -> Tensor:
    """What a head starts from, ``[b, h, 8]``: QK and VO as a whole, and the trace of QK."""
    QK = edges.values[..., : edges.sizes[0]]
    trace = QK.diagonal(dim1=-2, dim2=-1).mean(-1)
    # QK is centred, so that its trace says more than its mean.
    means = edges.rows.mean(-2)
    return torch.cat([trace, means[..., 2:STATISTICS], means[..., STATISTICS:]], -1)


def both_functions(x: Tensor) -> Tensor:
    """Of biases, ``[…]`` to ``[…, 2]``."""
    return torch.stack([x, steep(x)], -1)


def steep(x: Tensor) -> Tensor:
    """``w / √(|w| + 0.04)``: tells small weights apart and tames large ones."""
    return x / (x.abs() + KNEE).sqrt()


def _edges(sides: Sequence[Tensor]) -> Edges:
    """Of matrices ``[b, h, I, J]`` with the same rows."""
    sizes = tuple(x.shape[-1] for x in sides)
    powers = _powers(torch.cat(list(sides), -1))
    each_side = zip(*(x.split(sizes, -1) for x in powers), strict=True)
    return Edges(
        values=torch.stack(powers[:FUNCTIONS], 2),
        sizes=sizes,
        rows=torch.cat([_statistics(x, -1) for x in each_side], -1),
        columns=_statistics(powers, -2).split(sizes, -2),
    )


def _inputs(parts: Sequence[Tensor]) -> Edges:
    """Of matrices ``[n, 1, I, D]`` with the same columns; only these ask for statistics."""
    sizes = tuple(x.shape[-2] for x in parts)
    powers = _powers(torch.cat(list(parts), -2))
    each_part = zip(*(x.split(sizes, -2) for x in powers), strict=True)
    columns = torch.cat([_statistics(x, -2) for x in each_part], -1)
    values = torch.stack(powers[:FUNCTIONS], 2)
    return Edges(values, (values.shape[-1],), values.new_zeros(0), (columns,))


def _powers(x: Tensor) -> list[Tensor]:
    """Entry by entry the two functions, the square and the fourth power."""
    squares = x.square()
    return [x, steep(x), squares, squares.square()]


def _statistics(powers: Sequence[Tensor], axis: int) -> Tensor:
    """Means of both functions along an axis, and the logarithms of two norms, ``[…, 4]``."""
    plain, rooted, squares, fourth = (x.mean(axis) for x in powers)
    spread, peak = 0.5 * torch.log(squares + 1e-6), 0.25 * torch.log(fourth + 1e-9)
    return torch.stack([plain, rooted, spread, peak], -1)


class Messages(nn.Module):
    """Both directions along the edges of one sublayer.

    Args:
        channels: of every unit.
        sides: how many there are.
        heads: whether the sublayer has heads.
        inwards: whether the units inside listen; pixels and places do not.
    """

    def __init__(
        self, channels: int, sides: int, heads: bool = False, inwards: bool = True
    ) -> None:
        super().__init__()
        self.channels = channels
        self.from_inside = nn.Linear(channels, FUNCTIONS * channels, bias=False)
        self.to_side = _matrices(sides, channels)
        if inwards:
            self.from_side = _matrices(sides, channels)
            self.to_inside = nn.Linear(FUNCTIONS * channels, channels, bias=False)
        self.gates = nn.Linear(channels, 2 * FUNCTIONS * channels) if heads else None

    def outwards(self, edges: Edges, inside: Tensor, gate: Tensor | None = None) -> list[Tensor]:
        """Messages ``[b, J, c]`` to each side from the units inside, ``[b, I, c]``.

        Args:
            edges: of the sublayer.
            inside: units of the rows.
            gate: ``[b, h, 2, 1, c]``, the first of `head_gates`.
        """
        b, h, _, rows, columns = edges.values.shape
        sent = self.from_inside(inside).view(b, rows, FUNCTIONS, self.channels).transpose(1, 2)
        if gate is not None:
            sent = sent.unsqueeze(1) * gate
        values = edges.values.view(b, -1, columns)
        sums = torch.bmm(values.mT, sent.reshape(b, -1, self.channels))
        parts = (sums / (h * rows**0.5)).split(edges.sizes, 1)
        return [layer(part) for layer, part in zip(self.to_side, parts, strict=True)]

    def gathered(self, edges: Edges, sides: Sequence[Tensor]) -> Tensor:
        """The inner sums ``Σ_s Σ_j f_k(w_aij) Θ'_s x_j / √J``, ``[b, h, 2, I, c]``."""
        b, h, _, rows, columns = edges.values.shape
        sent = [layer(x) for layer, x in zip(self.from_side, sides, strict=True)]
        scaled = torch.cat(sent, 1) / columns**0.5
        sums = torch.bmm(edges.values.view(b, -1, columns), scaled)
        return sums.view(b, h, FUNCTIONS, rows, self.channels)

    def inwards(self, gathered: Tensor, gate: Tensor | None = None) -> Tensor:
        """Messages ``[b, I, c]`` to the units inside; ``gate`` is the second of `head_gates`."""
        gated = gathered if gate is None else gathered * gate
        out: Tensor = self.to_inside(gated.mean(1).transpose(1, 2).flatten(2))
        return out

    def head_gates(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """For both directions ``1 + …`` of heads ``[b, h, c]``, ``[b, h, 2, 1, c]`` each."""
        assert self.gates is not None
        made = 1 + self.gates(heads)
        shaped = made.view(*heads.shape[:2], 2, FUNCTIONS, 1, self.channels)
        return shaped[:, :, 0], shaped[:, :, 1]


class Update(nn.Module):
    """``LayerNorm(x + MLP(x, m))``, the same for every unit of a role.

    Args:
        channels: of every unit.
        messages: width of m.
    """

    def __init__(self, channels: int, messages: int) -> None:
        super().__init__()
        self.first = nn.Linear(channels + messages, 2 * channels)
        self.second = nn.Linear(2 * channels, channels)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor, messages: Tensor) -> Tensor:
        """Units ``[…, c]`` and messages ``[…, m]`` to units."""
        inner = nn.functional.silu(self.first(torch.cat([x, messages], -1)))
        out: Tensor = self.norm(x + self.second(inner))
        return out


def _matrices(count: int, channels: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(count))


class RoleLayers(nn.Module):
    """A whole network to ``width`` numbers, whatever its sizes.

    Args:
        channels: of every node.
        rounds: of messages.
        classes: of the networks.
        patch: pixels of a patch, or 0 for networks that read word vectors.
        tokens: positions there are; of longer ones the first so many are read.
        keep_scales: adds the logarithms of the scales LayerNorm discards. They may say something
            of how a network was trained, but the output is then no longer invariant under them.

    Attributes:
        width: of the output.
    """

    def __init__(
        self,
        channels: int = 8,
        rounds: int = 2,
        classes: int = 10,
        patch: int = 16,
        tokens: int = 49,
        keep_scales: bool = False,
    ) -> None:
        super().__init__()
        self.classes, self.patch, self.tokens = classes, patch, tokens
        self.keep_scales = keep_scales
        inputs = tokens + (patch + 1 if patch else 0)
        self.start = FirstNodes(channels, classes, input_parts=2 if patch else 1)
        self.inputs = nn.Parameter(torch.randn(inputs, channels))
        self.rounds = nn.ModuleList(Round(channels) for _ in range(rounds))
        self.width = 2 * channels * POOLED + 1 + (4 if keep_scales else 0)

    def forward(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
        """``[n, width]``, which no symmetry of a network changes.

        Args:
            network: blocks, classifier and embedding, as `normal_form` reads them.
            positions: as `normal_form` reads them; the zoo's sinusoids if not given.
        """
        form = self._form(network, positions)
        nodes = self._nodes(form)
        streams = _pool(nodes["streams"])
        pooled = [streams[:, 0], streams[:, 1:].mean(1), streams[:, -1]]
        for role in ("middle_streams", "neurons", "heads"):
            each = _pool(nodes[role])
            pooled += [each.mean(1), each[:, -1]]
        pooled += [_pool(nodes[role]) for role in ("hidden", "classes")]
        pooled.append(torch.log(form.W_2.square().mean((1, 2)) + 1e-9).unsqueeze(-1))
        if self.keep_scales:
            pooled += [form.log_scales.mean(1), form.log_scales[:, -1]]
        return torch.cat(pooled, -1)

    def nodes(
        self, network: Mapping[str, Any], positions: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Features of every node, which move with the units as a symmetry moves them.

        Returns:
            ``streams [n, L + 1, D, c]`` (before each block, and the last),
            ``middle_streams [n, L, D, c]``, ``neurons [n, L, F, c]``, ``heads [n, L, h, c]``,
            ``hidden [n, H, c]``, ``classes [n, classes, c]``.
        """
        return self._nodes(self._form(network, positions))

    def _nodes(self, form: NormalForm) -> dict[str, Tensor]:
        edges = edges_of(form)
        nodes: dict[str, Tensor] = self.start(form, edges)
        for each in self.rounds:
            nodes = each(edges, nodes, self.inputs)
        return nodes

    def _form(self, network: Mapping[str, Any], positions: Tensor | None) -> NormalForm:
        if positions is None:
            positions = self._sinusoids(network)
        if positions.ndim < 2 or positions.shape[-2] < self.tokens:
            raise SpaceError(
                f"positions must be of at least {self.tokens} tokens, found {list(positions.shape)}"
            )
        form = normal_form(network, positions[..., : self.tokens, :])
        patch = 0 if form.embedding is None else form.embedding.shape[1] - 1
        for what, found, expected in (
            ("pixels in a patch", patch, self.patch),
            ("classes", form.b_2.shape[1], self.classes),
        ):
            if found != expected:
                raise SpaceError(f"the layers read networks of {expected} {what}, found {found}")
        return form

    def _sinusoids(self, network: Mapping[str, Any]) -> Tensor:
        classifier = network.get("classifier")
        if not isinstance(classifier, Mapping) or "W_1" not in classifier:
            raise SpaceError("tensor 'classifier.W_1' is missing")
        like = classifier["W_1"]
        return _sinusoids(self.tokens, like.shape[-2], like.dtype, like.device)


class FirstNodes(nn.Module):
    """Each node from its rows and columns in every matrix it stands at, and from its bias.

    Args:
        channels: of every node.
        classes: of the networks; each class has features of its own.
        input_parts: matrices in front of the first stream: positions, and embedding.
    """

    def __init__(self, channels: int, classes: int, input_parts: int) -> None:
        super().__init__()
        self.role = nn.ParameterDict(
            {role: torch.randn(channels) * 0.5 for role in ("first_stream", *ROLES)}
        )
        self.each_class = nn.Parameter(torch.randn(classes, channels))

        def linear(width: int) -> nn.Linear:
            return nn.Linear(width, channels, bias=False)

        blocks = [name for name in SIDES if name != "inputs"]
        self.rows = nn.ModuleDict({k: linear(SIDES[k] * STATISTICS) for k in blocks})
        self.columns = nn.ModuleDict(
            {k: nn.ModuleList(linear(STATISTICS) for _ in range(SIDES[k])) for k in blocks}
        )
        self.inputs = linear(input_parts * STATISTICS)
        self.bias = nn.ModuleDict({k: linear(FUNCTIONS) for k in ("b_A", "b_B", "b_1", "b_2")})
        self.heads = linear(HEAD_STATISTICS)

    def forward(self, form: NormalForm, edges: Mapping[str, Edges]) -> dict[str, Tensor]:
        """Nodes as `RoleLayers.nodes` gives them."""
        n, L = form.A.shape[:2]
        role = self.role
        bias = {k: layer(both_functions(getattr(form, k))) for k, layer in self.bias.items()}
        before, keys, middle = (x.unflatten(0, (n, L)) for x in self._seen("attention", edges))
        neurons, read, after = (x.unflatten(0, (n, L)) for x in self._seen("mlp", edges))
        hidden, last, classes = self._seen("classifier", edges)
        first = role["first_stream"] + self.inputs(edges["inputs"].columns[0].mean(1))
        written = _joined(first, role["streams"] + after + bias["b_B"])
        heads = self.heads(head_statistics(edges["attention"])).unflatten(0, (n, L))
        return {
            "streams": written + _behind(before + keys, last),
            "middle_streams": role["middle_streams"] + middle + read,
            "neurons": role["neurons"] + neurons + bias["b_A"],
            "hidden": role["hidden"] + hidden + bias["b_1"],
            "classes": role["classes"] + self.each_class + classes + bias["b_2"],
            "heads": role["heads"] + heads,
        }

    def _seen(self, sublayer: str, edges: Mapping[str, Edges]) -> list[Tensor]:
        """Of the units inside and of those on each side, the mean over heads."""
        here, columns = edges[sublayer], self.columns[sublayer]
        assert isinstance(columns, nn.ModuleList)
        found = [self.rows[sublayer](here.rows.mean(1))]
        return found + [f(x.mean(1)) for f, x in zip(columns, here.columns, strict=True)]


class Round(nn.Module):
    """Messages along every edge both ways, then an update of every node.

    Args:
        channels: of every node.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inputs = Messages(channels, SIDES["inputs"], inwards=False)
        self.attention = Messages(channels, SIDES["attention"], heads=True)
        self.mlp = Messages(channels, SIDES["mlp"])
        self.classifier = Messages(channels, SIDES["classifier"])
        # A head hears through both functions.
        heard = {role: channels * (FUNCTIONS if role == "heads" else 1) for role in ROLES}
        self.updates = nn.ModuleDict({role: Update(channels, m) for role, m in heard.items()})

    def forward(
        self, edges: Mapping[str, Edges], nodes: Mapping[str, Tensor], inputs: Tensor
    ) -> dict[str, Tensor]:
        """Nodes as `RoleLayers.nodes` gives them, to the same; ``inputs`` are fixed nodes."""
        n, L = nodes["neurons"].shape[:2]
        streams, hidden = nodes["streams"], nodes["hidden"]
        before, after, last = (
            streams[:, :-1].flatten(0, 1),
            streams[:, 1:].flatten(0, 1),
            streams[:, -1],
        )
        middle, neurons, heads = (
            nodes[role].flatten(0, 1) for role in ("middle_streams", "neurons", "heads")
        )

        (to_first,) = self.inputs.outwards(edges["inputs"], inputs.expand(n, -1, -1))

        here = edges["attention"]
        forth, back = self.attention.head_gates(heads)
        to_keys, to_middle = self.attention.outwards(here, before, forth)
        gathered = self.attention.gathered(here, (before, middle))
        to_before = to_keys + self.attention.inwards(gathered, back)
        # x_i ⊙ (f_k(w_a) x)_i, the mean over units: what a head does to the streams as they are.
        to_heads = (gathered * before[:, None, None]).mean(-2).flatten(2)

        from_mlp, to_after = self.mlp.outwards(edges["mlp"], neurons)
        to_neurons = self.mlp.inwards(self.mlp.gathered(edges["mlp"], (middle, after)))

        here = edges["classifier"]
        to_last, to_classes = self.classifier.outwards(here, hidden)
        to_hidden = self.classifier.inwards(
            self.classifier.gathered(here, (last, nodes["classes"]))
        )

        written = _joined(to_first, to_after.unflatten(0, (n, L)))
        heard = {
            "streams": written + _behind(to_before.unflatten(0, (n, L)), to_last),
            "middle_streams": (to_middle + from_mlp).unflatten(0, (n, L)),
            "neurons": to_neurons.unflatten(0, (n, L)),
            "hidden": to_hidden,
            "classes": to_classes,
            "heads": to_heads.unflatten(0, (n, L)),
        }
        return {role: update(nodes[role], heard[role]) for role, update in self.updates.items()}


@lru_cache(maxsize=16)
def _sinusoids(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept where they are used, so that a captured step copies nothing to the device."""
    return sinusoids(tokens, width).to(dtype=dtype, device=device)


def _joined(first: Tensor, later: Tensor) -> Tensor:
    """The first stream ``[n, D, c]`` in front of the later ones ``[n, L, D, c]``."""
    return torch.cat([first.unsqueeze(1), later], 1)


def _behind(earlier: Tensor, last: Tensor) -> Tensor:
    """The last stream ``[n, D, c]`` behind those that blocks read, ``[n, L, D, c]``."""
    return torch.cat([earlier, last.unsqueeze(1)], 1)


def _pool(nodes: Tensor) -> Tensor:
    """Mean and deviation over units, ``[…, units, c]`` to ``[…, 2 c]``."""
    deviation = (nodes.var(-2, correction=0) + 1e-6).sqrt()
    return torch.cat([nodes.mean(-2), deviation], -1)
