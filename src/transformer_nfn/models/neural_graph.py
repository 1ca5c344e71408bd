"""`NeuralGraph`: a graph network on the neurons and weights of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from transformer_nfn.models.task_reader import TaskReader
from transformer_nfn.spaces import WeightSpace

NODES = ("pixel", "stream", "qk", "vo", "feature", "neuron", "hidden", "class")
"""Kinds of nodes: axes of the network's tensors."""
EDGES = ("W", "W_Q", "W_K", "W_V", "W_O", "W_A", "W_B", "W_1", "W_2")
"""Kinds of edges: tensors of the network."""
POOLED = 3
"""Mean, standard deviation and maximum."""


@dataclass(frozen=True)
class Edges:
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
        kinds: kind of each set of nodes, one of `NODES`.
        biases: bias and depth of each node of a set, ``[n, nodes, 2]``.
        edges: all tensors of rank two and more.
        heads: number of heads of every block.
    """

    kinds: Mapping[str, str]
    biases: Mapping[str, Tensor]
    edges: list[Edges]
    heads: list[int]

    @staticmethod
    def of(network: Mapping[str, Any]) -> Graph:
        """Nodes are pixels, stream channels, units of heads, neurons and classes."""
        blocks, last = network["blocks"], network["classifier"]
        edges, biases = [], {}
        if network.get("embedding") is not None:
            first = network["embedding"]
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
        names = {each.source: each.weights[:, :, 0] for each in edges}
        names |= {each.target: each.weights[:, 0] for each in edges}
        features = {}
        for name, like in names.items():
            bias = biases.get(name, torch.zeros_like(like))
            number = name.lstrip("abcdefghijklmnopqrstuvwxyz")
            depth = int(number) / len(blocks) if number else 1.0
            features[name] = torch.stack([bias, torch.full_like(bias, depth)], -1)
        kinds = {name: name.rstrip("0123456789") for name in names}
        return Graph(kinds, features, edges, [block["W_Q"].shape[2] for block in blocks])


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
        self, graph: Graph, nodes: dict[str, Tensor], edges: list[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """States of nodes by the name of their set, and of edges, after this layer."""
        normed = {name: self.norm(x) for name, x in nodes.items()}
        incoming: dict[str, Tensor] = {}
        outgoing: dict[str, Tensor] = {}
        states = []
        for each, state in zip(graph.edges, edges, strict=True):
            ends = self.source(normed[each.source])[:, :, None]
            ends = ends + self.target(normed[each.target])[:, None]
            scale, shift = self.modulation(state).chunk(2, -1)
            message = silu(scale * ends + shift)
            states.append(state + self.edge(message))
            for received, name, axis in ((incoming, each.target, 1), (outgoing, each.source, 2)):
                pooled = _pooled(message, axis)
                received[name] = received[name] + pooled if name in received else pooled
        out = {}
        for name, x in normed.items():
            some = incoming.get(name, outgoing.get(name))
            assert some is not None
            zeros = torch.zeros_like(some)
            parts = [x, incoming.get(name, zeros), outgoing.get(name, zeros)]
            out[name] = nodes[name] + self.node(torch.cat(parts, -1))
        for i, heads in enumerate(graph.heads):
            units = [normed[f"{kind}{i}"].unflatten(1, (heads, -1)) for kind in ("qk", "vo")]
            shared = self.head(torch.cat([u.mean(2) for u in units], -1))
            for kind, unit in zip(("qk", "vo"), units, strict=True):
                to_units = shared[:, :, None].expand(-1, -1, unit.shape[2], -1).flatten(1, 2)
                out[f"{kind}{i}"] = out[f"{kind}{i}"] + to_units
        return out, states


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

    def features(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
        """Nodes of each kind pooled, ``[batch, F]``; F is the same for networks of any size."""
        graph = Graph.of(network)
        nodes = self._nodes(graph, self._where(network, positions))
        edges = []
        for each in graph.edges:
            kind = EDGES.index(each.kind)
            edges.append(each.weights.unsqueeze(-1) * self.weight[kind] + self.edge_kinds[kind])
        for layer in self.layers:
            nodes, edges = layer(graph, nodes, edges)
        pooled: dict[str, list[Tensor]] = {kind: [] for kind in NODES}
        for name, x in nodes.items():
            pooled[graph.kinds[name]].append(_pooled(x, 1))
        nothing = torch.zeros_like(pooled["stream"][0])
        means = [torch.stack(x).mean(0) if x else nothing for x in pooled.values()]
        return torch.cat(means, -1)

    def logits(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        out: Tensor = self.head(self.features(network, positions))
        return out.squeeze(-1)

    def _nodes(self, graph: Graph, where: Tensor) -> dict[str, Tensor]:
        """States before the first layer; axes whose order the task fixes know their index."""
        nodes = {
            name: self.bias(x) + self.node_kinds[NODES.index(graph.kinds[name])]
            for name, x in graph.biases.items()
        }
        first = "pixel" if self._config["images"] else "stream0"
        nodes[first] = nodes[first] + self.inputs
        nodes["stream0"] = nodes["stream0"] + self.positions(where[: self._config["tokens"]].mT)
        nodes["class"] = nodes["class"] + self.outputs
        return nodes


def _pooled(x: Tensor, axis: int) -> Tensor:
    variance, mean = torch.var_mean(x, axis, correction=0)
    return torch.cat([mean, (variance + 1e-6).sqrt(), x.amax(axis)], -1)
