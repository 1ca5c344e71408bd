"""`NeuralGraph`: a graph network on the neurons and weights of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from transformer_nfn.models.batch import Batch
from transformer_nfn.models.predictor import predictor
from transformer_nfn.models.task_reader import TaskReader
from transformer_nfn.spaces import WeightSpace

NODES = ("pixel", "stream", "qk", "vo", "feature", "neuron", "hidden", "class")
"""Kinds of nodes: axes of the network's tensors."""
EDGES = ("W", "W_Q", "W_K", "W_V", "W_O", "W_A", "W_B", "W_1", "W_2")
"""Kinds of edges: tensors of the network."""
POOLED = 3
"""Mean, standard deviation and maximum."""


class Edges(NamedTuple):
    """The entries of one tensor as edges between two sets of nodes.

    Attributes:
        kind: one of `EDGES`.
        source: name of the set they come from.
        target: name of the set they lead to.
        weights: ``[n, sources, targets]``.
    """

    kind: str
    source: str
    target: str
    weights: Tensor


@dataclass(frozen=True)
class Graph:
    """A batch of networks as graphs of one shape.

    Attributes:
        sizes: number of nodes of each set, in the order of all nodes.
        biases: bias and depth of each node, ``[n, nodes, 2]``.
        groups: tensors of rank two, those of equal shape together.
        heads: number of heads of every block.
    """

    sizes: Mapping[str, int]
    biases: Tensor
    groups: list[list[Edges]]
    heads: list[int]

    @staticmethod
    def of(batch: Batch) -> Graph:
        """Nodes are pixels, stream channels, units of heads, neurons and classes."""
        blocks, last = batch.blocks(), batch.part("classifier")
        edges, biases = [], {}
        if first := batch.part("embedding"):
            edges.append(Edges("W", "pixel", "stream0", first["W"]))
            biases["stream0"] = first["b"]
        for i, block in enumerate(blocks):
            w = {name: x[:, 0] for name, x in block.items()}
            for name, units in (("W_Q", "qk"), ("W_K", "qk"), ("W_V", "vo")):
                flat = w[name].transpose(1, 2).flatten(2)
                edges.append(Edges(name, f"stream{i}", f"{units}{i}", flat))
            edges += [
                Edges("W_O", f"vo{i}", f"feature{i}", w["W_O"].flatten(1, 2)),
                Edges("W_A", f"feature{i}", f"neuron{i}", w["W_A"]),
                Edges("W_B", f"neuron{i}", f"stream{i + 1}", w["W_B"]),
            ]
            biases |= {f"neuron{i}": w["b_A"], f"stream{i + 1}": w["b_B"]}
        edges += [
            Edges("W_1", f"stream{len(blocks)}", "hidden", last["W_1"]),
            Edges("W_2", "hidden", "class", last["W_2"]),
        ]
        biases |= {"hidden": last["b_1"], "class": last["b_2"]}
        ends = {each.source: each.weights[:, :, 0] for each in edges}
        ends |= {each.target: each.weights[:, 0] for each in edges}
        groups: dict[tuple[int, ...], list[Edges]] = {}
        for each in edges:
            groups.setdefault(tuple(each.weights.shape[1:]), []).append(each)
        features = []
        for name, like in ends.items():
            number = name.removeprefix(_kind(name))
            depth = torch.full_like(like, int(number) / len(blocks) if number else 1.0)
            features.append(torch.stack([biases.get(name, torch.zeros_like(like)), depth], -1))
        sizes = {name: like.shape[1] for name, like in ends.items()}
        heads = [block["W_Q"].shape[2] for block in blocks]
        return Graph(sizes, torch.cat(features, 1), list(groups.values()), heads)

    def split(self, nodes: Tensor) -> dict[str, Tensor]:
        """States ``[n, nodes, …]`` by the set of the nodes."""
        return dict(zip(self.sizes, nodes.split(list(self.sizes.values()), 1), strict=True))


class GraphLayer(nn.Module):
    """Messages along edges in both directions, then new states of edges and nodes.

    Args:
        width: of the state of a node.
        edge_width: of the state of an edge.
    """

    def __init__(self, width: int, edge_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.source = nn.Linear(width, edge_width)
        self.target = nn.Linear(width, edge_width, bias=False)
        self.modulation = nn.Linear(edge_width, 2 * edge_width)
        self.edge = nn.Linear(edge_width, edge_width)
        self.head = nn.Linear(2 * width, width)
        self.node = nn.Sequential(
            nn.Linear(width + 2 * POOLED * edge_width, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, width),
        )

    def forward(
        self, graph: Graph, nodes: Tensor, edges: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """States of all nodes, and of the edges of each group, after this layer."""
        normed = self.norm(nodes)
        sources, targets = graph.split(self.source(normed)), graph.split(self.target(normed))
        incoming: dict[str, list[Tensor]] = {name: [] for name in graph.sizes}
        outgoing: dict[str, list[Tensor]] = {name: [] for name in graph.sizes}
        states = []
        for group, state in zip(graph.groups, edges, strict=True):
            ends = torch.stack([sources[each.source] for each in group], 1).unsqueeze(3)
            ends = ends + torch.stack([targets[each.target] for each in group], 1).unsqueeze(2)
            scale, shift = self.modulation(state).chunk(2, -1)
            message = silu(scale * ends + shift)
            states.append(state + self.edge(message))
            into, out_of = _pooled(message, 2).unbind(1), _pooled(message, 3).unbind(1)
            for each, received, sent in zip(group, into, out_of, strict=True):
                incoming[each.target].append(received)
                outgoing[each.source].append(sent)
        sums = [_sums(part, graph, nodes) for part in (incoming, outgoing)]
        nodes = nodes + self.node(torch.cat([normed, *sums], -1))
        return nodes + self._between_units(graph, graph.split(normed)), states

    def _between_units(self, graph: Graph, normed: dict[str, Tensor]) -> Tensor:
        """The message to all units of a head, a map of their means; zero for other nodes."""
        parts = {name: torch.zeros_like(x) for name, x in normed.items()}
        for i, heads in enumerate(graph.heads):
            units = [normed[f"{kind}{i}"].unflatten(1, (heads, -1)) for kind in ("qk", "vo")]
            shared = self.head(torch.cat([x.mean(2) for x in units], -1))[:, :, None]
            for kind, x in zip(("qk", "vo"), units, strict=True):
                parts[f"{kind}{i}"] = shared.expand(-1, -1, x.shape[2], -1).flatten(1, 2)
        return torch.cat(list(parts.values()), 1)


@predictor("neural_graph")
class NeuralGraph(TaskReader):
    """Graph network on a network's own graph (Kofinas et al., 2024; Lim et al., 2024).

    Nodes are pixels, stream channels, units of heads, neurons and classes, with their biases; edges
    are weights. All tensors share the layers and differ by a learned embedding of their kind.
    Messages are modulated by the state of their edge and pooled by mean, standard deviation and
    maximum; the units of a head share their mean. Permutations of heads, their units, neurons and
    stream channels change nothing; other matrices inside a head do.

    >>> model = NeuralGraph()
    >>> sum(p.numel() for p in model.parameters())
    264801

    Args:
        space: weight space of one block of the training networks; None for the paper's block.
        tokens: positions that are added to the first stream.
        width: pixels of a patch, or width of a word vector.
        classes: classes of the networks' task.
        images: whether networks have an embedding of patches.
        hidden: width of the state of a node.
        edges: width of the state of an edge.
        layers: number of layers.
    """

    stacked = True
    title = "Neural graph"
    protocol: ClassVar[Mapping[str, Any]] = {"batch": 32}

    def __init__(
        self,
        space: WeightSpace | None = None,
        *,
        tokens: int = 49,
        width: int = 16,
        classes: int = 10,
        images: bool = True,
        hidden: int = 64,
        edges: int = 16,
        layers: int = 4,
    ) -> None:
        super().__init__(
            space, images, tokens=tokens, width=width, classes=classes, hidden=hidden,
            edges=edges, layers=layers,
        )  # fmt: skip
        self.node_kinds = nn.Parameter(torch.randn(len(NODES), hidden))
        self.bias = nn.Linear(2, hidden)
        self.inputs = nn.Parameter(torch.randn(width, hidden))
        self.outputs = nn.Parameter(torch.randn(classes, hidden))
        self.positions = nn.Linear(tokens, hidden)
        self.edge_kinds = nn.Parameter(torch.randn(len(EDGES), edges))
        self.weight = nn.Parameter(torch.randn(len(EDGES), edges))
        self.layers = nn.ModuleList(GraphLayer(hidden, edges) for _ in range(layers))
        self.head = nn.Sequential(
            nn.Linear(POOLED * len(NODES) * hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1)
        )

    def features(self, batch: Batch) -> Tensor:
        """Nodes of each kind pooled, ``[batch, F]``; F is the same for networks of any size."""
        graph = Graph.of(batch)
        nodes = self._nodes(graph, self._where(batch))
        edges = []
        for group in graph.groups:
            kinds = [EDGES.index(each.kind) for each in group]
            scale, shift = (torch.stack([x[k] for k in kinds])[:, None, None]
                            for x in (self.weight, self.edge_kinds))  # fmt: skip
            weights = torch.stack([each.weights for each in group], 1)
            edges.append(weights.unsqueeze(-1) * scale + shift)
        for layer in self.layers:
            nodes, edges = layer(graph, nodes, edges)
        pooled: dict[str, list[Tensor]] = {kind: [] for kind in NODES}
        for name, x in graph.split(nodes).items():
            pooled[_kind(name)].append(_pooled(x, 1))
        nothing = torch.zeros_like(pooled["stream"][0])
        means = [torch.stack(x).mean(0) if x else nothing for x in pooled.values()]
        return torch.cat(means, -1)

    def _nodes(self, graph: Graph, where: Tensor) -> Tensor:
        """States before the first layer; axes whose order the task fixes know their index."""
        nodes = {
            name: x + self.node_kinds[NODES.index(_kind(name))]
            for name, x in graph.split(self.bias(graph.biases)).items()
        }
        first = "pixel" if self._config["images"] else "stream0"
        nodes[first] = nodes[first] + self.inputs
        nodes["stream0"] = nodes["stream0"] + self.positions(where[: self._config["tokens"]].mT)
        nodes["class"] = nodes["class"] + self.outputs
        return torch.cat(list(nodes.values()), 1)


def _kind(name: str) -> str:
    """Kind of a set of nodes, which its name begins with."""
    return name.rstrip("0123456789")


def _pooled(x: Tensor, axis: int) -> Tensor:
    variance, mean = torch.var_mean(x, axis, correction=0)
    return torch.cat([mean, (variance + 1e-6).sqrt(), x.amax(axis)], -1)


def _sums(parts: Mapping[str, list[Tensor]], graph: Graph, like: Tensor) -> Tensor:
    """Sum of the parts of each set, zeros where there are none, for all nodes."""
    width = next(x for some in parts.values() for x in some).shape[-1]
    out = []
    for name, size in graph.sizes.items():
        empty = like.new_zeros(like.shape[0], size, width)
        out.append(sum(parts[name][1:], parts[name][0]) if parts[name] else empty)
    return torch.cat(out, 1)
