"""The layers over whole networks once more, unit by unit, from the equations alone.

One network at a time, plain loops over units, heads and functions. Of the module only its
parameters are read, by name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Units = list[Tensor]


def literal_nodes(
    module: Any, network: dict[str, Any], positions: Tensor, at: int
) -> dict[str, Tensor]:
    """What `RoleLayers.nodes` gives for network ``at`` of a batch."""
    return _Literal(module, network, positions, at).run()


class _Literal:
    def __init__(self, module: Any, network: dict[str, Any], positions: Tensor, at: int) -> None:
        self.p = dict(module.state_dict())
        self.rounds = len(module.rounds)
        blocks = [{k: w[at, 0] for k, w in b.items()} for b in network["blocks"]]
        ends = {k: w[at] for k, w in network["classifier"].items()}
        self.L, self.D = len(blocks), positions.shape[1]
        self.H = len(ends["b_1"])
        self.blocks = [self.block(b) for b in blocks]
        W_1, self.b_1, W_2 = unit_neurons(ends["W_1"], ends["b_1"], ends["W_2"])
        self.b_2 = centre_rows(ends["b_2"][None])[0]
        self.sides_1 = W_1.T * math.sqrt(self.D)
        self.sides_2 = W_2 * math.sqrt(self.H)
        self.parts = [centre_rows(positions)]
        if "embedding" in network:
            e = {k: w[at] for k, w in network["embedding"].items()}
            rows = [e["W"][i] for i in range(len(e["W"]))] + [e["b"]]
            self.parts.insert(0, centre_rows(torch.stack(rows)))

    def block(self, w: dict[str, Tensor]) -> dict[str, Any]:
        heads, D, d = w["W_Q"].shape
        QK = [centre_both(w["W_Q"][a] @ w["W_K"][a].T) * D / math.sqrt(d) for a in range(heads)]
        VO = [centre_both(w["W_V"][a] @ w["W_O"][a]) for a in range(heads)]
        rms = math.sqrt(sum(float((x**2).sum()) for x in VO) / (heads * D * D))
        A, b_A, B = unit_neurons(w["W_A"], w["b_A"], w["W_B"])
        b_B = centre_rows(w["b_B"][None])[0]
        total = float((B**2).sum() + (b_B**2).sum()) / (D * (len(b_A) + 1))
        return {
            "attention": [[QK[a], VO[a] / rms] for a in range(heads)],
            "mlp": [[A.T * math.sqrt(D), B / math.sqrt(total)]],
            "b_A": b_A,
            "b_B": b_B / math.sqrt(total),
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = self.p[f"{name}.weight"] @ x
        return out + self.p[f"{name}.bias"] if f"{name}.bias" in self.p else out

    def run(self) -> dict[str, Tensor]:
        self.first_nodes()
        for r in range(self.rounds):
            self.one_round(f"rounds.{r}")
        return {
            "streams": torch.stack([torch.stack(x) for x in self.streams]),
            "middle_streams": torch.stack([torch.stack(x) for x in self.middle]),
            "neurons": torch.stack([torch.stack(x) for x in self.neurons]),
            "heads": torch.stack([torch.stack(x) for x in self.heads]),
            "hidden": torch.stack(self.hidden),
            "classes": torch.stack(self.classes),
        }

    def first_nodes(self) -> None:
        role = {k[11:]: v for k, v in self.p.items() if k.startswith("start.role.")}
        self.streams = [[role["first_stream" if i == 0 else "streams"].clone()
                         for _ in range(self.D)] for i in range(self.L + 1)]  # fmt: skip
        self.middle, self.neurons, self.heads = [], [], []
        for i, block in enumerate(self.blocks):
            rows, (keys, middle) = self.seen("attention", block["attention"])
            inner, (read, after) = self.seen("mlp", block["mlp"])
            for j in range(self.D):
                self.streams[i][j] = self.streams[i][j] + rows[j] + keys[j]
                bias = self.bias("b_B", block["b_B"][j])
                self.streams[i + 1][j] = self.streams[i + 1][j] + after[j] + bias
            self.middle.append([role["middle_streams"] + middle[j] + read[j]
                                for j in range(self.D)])  # fmt: skip
            self.neurons.append([role["neurons"] + x + self.bias("b_A", b)
                                 for x, b in zip(inner, block["b_A"], strict=True)])  # fmt: skip
            self.heads.append([role["heads"] + self.linear("start.heads", head_numbers(QK, VO))
                               for QK, VO in block["attention"]])  # fmt: skip
        hidden, (last, classes) = self.seen("classifier", [[self.sides_1, self.sides_2]])
        for j in range(self.D):
            numbers = torch.cat([numbers_of(x[:, j]) for x in self.parts])
            self.streams[0][j] = self.streams[0][j] + self.linear("start.inputs", numbers)
            self.streams[-1][j] = self.streams[-1][j] + last[j]
        self.hidden = [role["hidden"] + hidden[i] + self.bias("b_1", self.b_1[i])
                       for i in range(self.H)]  # fmt: skip
        self.classes = [
            role["classes"] + self.p["start.each_class"][c] + classes[c] + self.bias("b_2", b)
            for c, b in enumerate(self.b_2)
        ]

    def bias(self, name: str, b: Tensor) -> Tensor:
        return self.linear(f"start.bias.{name}", torch.stack([b, root(b)]))

    def seen(self, sublayer: str, heads: list[list[Tensor]]) -> tuple[Units, list[Units]]:
        """For each row, and for each column of each side, the mean over heads."""
        rows = []
        for i in range(len(heads[0][0])):
            each = [torch.cat([numbers_of(side[i]) for side in head]) for head in heads]
            rows.append(self.linear(f"start.rows.{sublayer}", sum(each) / len(heads)))
        columns = []
        for s in range(2):
            name, units = f"start.columns.{sublayer}.{s}", []
            for j in range(heads[0][s].shape[1]):
                each = [numbers_of(head[s][:, j]) for head in heads]
                units.append(self.linear(name, sum(each) / len(heads)))
            columns.append(units)
        return rows, columns

    def one_round(self, name: str) -> None:
        zero = torch.zeros_like(self.hidden[0])
        to_streams = [[zero] * self.D for _ in range(self.L + 1)]
        to_middle, to_neurons, to_heads = [], [], []
        inputs = torch.cat(self.parts)
        fixed = list(self.p["inputs"])
        (to_streams[0],) = self.outwards(f"{name}.inputs", [[inputs]], fixed, None)
        for i, block in enumerate(self.blocks):
            before, after = self.streams[i], self.streams[i + 1]
            middle, neurons, heads = self.middle[i], self.neurons[i], self.heads[i]
            at, edges = f"{name}.attention", block["attention"]
            keys, moved = self.outwards(at, edges, before, heads)
            gathered = self.gathered(at, edges, [before, middle])
            queries = self.inwards(at, gathered, heads)
            to_heads.append([
                torch.cat([sum(gathered[a][k][j] * before[j] for j in range(self.D)) / self.D
                           for k in range(2)])
                for a in range(len(heads))
            ])  # fmt: skip
            at, edges = f"{name}.mlp", block["mlp"]
            read, written = self.outwards(at, edges, neurons, None)
            to_neurons.append(self.inwards(at, self.gathered(at, edges, [middle, after]), None))
            to_middle.append([moved[j] + read[j] for j in range(self.D)])
            for j in range(self.D):
                to_streams[i][j] = to_streams[i][j] + keys[j] + queries[j]
                to_streams[i + 1][j] = to_streams[i + 1][j] + written[j]
        at, edges = f"{name}.classifier", [[self.sides_1, self.sides_2]]
        to_last, to_classes = self.outwards(at, edges, self.hidden, None)
        gathered = self.gathered(at, edges, [self.streams[-1], self.classes])
        to_hidden = self.inwards(at, gathered, None)
        to_streams[-1] = [x + y for x, y in zip(to_streams[-1], to_last, strict=True)]

        def all_of(role: str, units: Units, heard: Units) -> Units:
            pairs = zip(units, heard, strict=True)
            return [self.update(f"{name}.updates.{role}", x, m) for x, m in pairs]

        def in_blocks(role: str, units: list[Units], heard: list[Units]) -> list[Units]:
            return [all_of(role, x, m) for x, m in zip(units, heard, strict=True)]

        self.streams = in_blocks("streams", self.streams, to_streams)
        self.middle = in_blocks("middle_streams", self.middle, to_middle)
        self.neurons = in_blocks("neurons", self.neurons, to_neurons)
        self.heads = in_blocks("heads", self.heads, to_heads)
        self.hidden = all_of("hidden", self.hidden, to_hidden)
        self.classes = all_of("classes", self.classes, to_classes)

    def gate(self, name: str, head: Tensor, way: int, k: int) -> Tensor:
        c = len(head)
        start = (2 * way + k) * c
        return 1 + self.linear(f"{name}.gates", head)[start : start + c]

    def outwards(
        self, name: str, edges: list[list[Tensor]], inside: Units, heads: Units | None
    ) -> list[Units]:
        c, out = len(inside[0]), []
        for s in range(len(edges[0])):
            units = []
            for j in range(edges[0][s].shape[1]):
                total = torch.zeros(c, dtype=torch.float64)
                for a, head in enumerate(edges):
                    for k, f in enumerate((lambda w: w, root)):
                        gate = 1 if heads is None else self.gate(name, heads[a], 0, k)
                        for i, x in enumerate(inside):
                            sent = self.linear(f"{name}.from_inside", x)[k * c : (k + 1) * c]
                            total = total + f(head[s][i, j]) * (gate * sent)
                total = total / (len(edges) * math.sqrt(len(inside)))
                units.append(self.linear(f"{name}.to_side.{s}", total))
            out.append(units)
        return out

    def gathered(
        self, name: str, edges: list[list[Tensor]], sides: list[Units]
    ) -> list[list[Units]]:
        """By head, function and unit inside."""
        count = sum(len(side) for side in sides)
        return [
            [
                [
                    sum(
                        f(head[s][i, j]) * self.linear(f"{name}.from_side.{s}", x)
                        for s, side in enumerate(sides)
                        for j, x in enumerate(side)
                    )
                    / math.sqrt(count)
                    for i in range(len(head[0]))
                ]
                for f in (lambda w: w, root)
            ]
            for head in edges
        ]

    def inwards(self, name: str, gathered: list[list[Units]], heads: Units | None) -> Units:
        out = []
        for i in range(len(gathered[0][0])):
            each = []
            for k in range(2):
                total = torch.zeros_like(gathered[0][0][i])
                for a, head in enumerate(gathered):
                    gate = 1 if heads is None else self.gate(name, heads[a], 1, k)
                    total = total + gate * head[k][i]
                each.append(total / len(gathered))
            out.append(self.linear(f"{name}.to_inside", torch.cat(each)))
        return out

    def update(self, name: str, x: Tensor, message: Tensor) -> Tensor:
        inner = self.linear(f"{name}.first", torch.cat([x, message]))
        y = x + self.linear(f"{name}.second", inner / (1 + torch.exp(-inner)))
        y = (y - y.mean()) / torch.sqrt(((y - y.mean()) ** 2).mean() + 1e-5)
        return y * self.p[f"{name}.norm.weight"] + self.p[f"{name}.norm.bias"]


def root(w: Tensor) -> Tensor:
    return w / torch.sqrt(w.abs() + 0.04)


def numbers_of(w: Tensor) -> Tensor:
    """Of a row or column: two means, two logarithms of norms."""
    n = len(w)
    return torch.stack([
        sum(w) / n,
        sum(root(x) for x in w) / n,
        torch.log(sum(x**2 for x in w) / n + 1e-6) / 2,
        torch.log(sum(x**4 for x in w) / n + 1e-9) / 4,
    ])  # fmt: skip


def head_numbers(QK: Tensor, VO: Tensor) -> Tensor:
    """The means over rows, the trace of QK in place of its mean."""
    D = len(QK)
    rows = [sum(numbers_of(M[i]) for i in range(D)) / D for M in (QK, VO)]
    trace = [sum(f(QK[i, i]) for i in range(D)) / D for f in (lambda w: w, root)]
    return torch.cat([torch.stack(trace), rows[0][2:], rows[1]])


def centre_rows(x: Tensor) -> Tensor:
    return torch.stack([row - sum(row) / len(row) for row in x])


def centre_both(x: Tensor) -> Tensor:
    return centre_rows(centre_rows(x).T).T


def unit_neurons(W: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Incoming weights centred, and with the bias of norm 1; outgoing ones times the norms.

    What a neuron passes on is the mean square of its outgoing weights then; one that passes on a
    millionth of the layer's mean has its incoming weights halved, one that passes on less, more.
    """
    W = centre_rows(W.T).T
    every = range(len(b))
    norms = [math.sqrt(float((W[:, i] ** 2).sum() + b[i] ** 2)) for i in every]
    out = centre_rows(torch.stack([out[i] * norms[i] for i in every]))
    passed = [float((out[i] ** 2).mean()) for i in every]
    usual = sum(passed) / len(passed)
    share = [passed[i] / (passed[i] + 1e-6 * usual) / norms[i] for i in every]
    columns = [W[:, i] * share[i] for i in every]
    return torch.stack(columns, 1), torch.stack([b[i] * share[i] for i in every]), out
