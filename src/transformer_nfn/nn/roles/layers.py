"""Layers over a whole network of any width, number of heads and depth: parameters by role.

The units of every width axis are nodes: each stream between two sublayers, neurons, hidden units of
the classifier, heads. Classes, pixels and places are nodes too, fixed ones, each with features of
its own; places reach the first stream through the positions, a constant that carries its axis.
Edges are the matrices of the normal form (`normal.py`), sublayer by sublayer (`edges.py`).

**Exact.** Permuting heads, neurons, hidden units or any stream (the first one together with the
positions) permutes the nodes and nothing else. Invertible matrices inside QK and VO, positive
scales of ReLU neurons, and scales and means that LayerNorm discards change nothing.

**Not complete.** The normal form is complete for the scales, means and matrices named: it loses
nothing else (logits up to a common number). The layers above it are not: they are not all
equivariant maps, linear or not, and as message passing they cannot tell apart all networks that no
permutation joins. Nor do they know that LayerNorm without gains also lets *rotations* of a stream
pass that keep the ones vector; independent training does not make such copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.zoo_network import sinusoids
from transformer_nfn.nn.roles.edges import (
    FUNCTIONS,
    HEAD_STATISTICS,
    STATISTICS,
    Edges,
    both_functions,
    edges_of,
    head_statistics,
)
from transformer_nfn.nn.roles.messages import Messages, Update
from transformer_nfn.nn.roles.normal import NormalForm, normal_form

ROLES = ("streams", "middle_streams", "neurons", "hidden", "classes", "heads")
SIDES = {"inputs": 1, "attention": 2, "mlp": 2, "classifier": 2}
POOLED = 11
"""Pools of nodes in the output: three of streams, two for each role of blocks, two others."""


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
