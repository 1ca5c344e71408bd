"""Predictors as users write them, in styles that are not ours."""

import torch
from torch import nn


class SetEncoder(nn.Module):
    """The class of the documentation."""

    reads = "tensors"

    def __init__(self, layout, width=64):
        super().__init__()
        rows = [shape for shape in layout.values() if len(shape) == 2]
        self.encode = nn.ModuleList(nn.Linear(shape[0], width) for shape in rows)
        self.head = nn.Linear(width * len(rows), 1)

    def forward(self, batch):
        two = [w for w in batch.values() if w.ndim == 3]
        h = [f(w.mT).relu().mean(1) for f, w in zip(self.encode, two, strict=True)]
        return self.head(torch.cat(h, -1)).squeeze(-1)


class WeightGraph(nn.Module):
    """Messages between the neurons that a matrix joins."""

    reads = "tensors"

    def __init__(self, layout, width=8, rounds=2):
        super().__init__()
        self.names = [name for name, shape in layout.items() if len(shape) == 2]
        self.rows = nn.ParameterList(
            nn.Parameter(torch.randn(layout[name][0], width)) for name in self.names
        )
        self.update = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.head = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        read = []
        for name, start in zip(self.names, self.rows, strict=True):
            w = batch[name]
            state = start.expand(len(w), *start.shape)
            for layer in self.update:
                received = w.mT @ state  # columns hear from rows, then rows from columns
                state = layer(w @ received).tanh() + state
            read.append(state.mean(1))
        return self.head(torch.cat(read, -1)).squeeze(-1)


class Pictures(nn.Module):
    """A CNN over the matrices of a network, stacked as channels of one picture."""

    reads = "tensors"

    def __init__(self, layout, side=16):
        super().__init__()
        self.side = side
        matrices = sum(len(shape) == 2 for shape in layout.values())
        self.net = nn.Sequential(
            nn.Conv2d(matrices, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(32, 1),
        )

    def forward(self, batch):
        resize = nn.functional.adaptive_avg_pool2d
        stacked = [resize(w, (self.side, self.side)) for w in batch.values() if w.ndim == 3]
        return self.net(torch.stack(stacked, 1))


class Regularised(nn.Module):
    """An MLP with BatchNorm and dropout on all weights, and an optimiser of its own."""

    reads = "packed"
    protocol = {"batch": 8}  # noqa: RUF012

    def __init__(self, layout, width=16):
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(
            nn.LazyLinear(width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(width, 1),
        )

    def forward(self, batch):
        if self.training:
            batch = batch + 0.01 * torch.randn(batch.shape, generator=self.draws).to(batch)
        return self.net(batch).squeeze(-1)

    def optimiser(self, rate):
        return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)

    def loss(self, logits, target):
        return (logits.sigmoid() - target).square().mean()


class FitsItself(nn.Module):
    """Trains itself on statistics."""

    reads = "statistics"

    def __init__(self, layout):
        super().__init__()
        (shape,) = layout.values()
        self.net = nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], 1))

    def forward(self, batch):
        return self.net(batch).squeeze(-1)

    def fit(self, train, val):
        batch, target = train
        optimiser = torch.optim.AdamW(self.parameters(), lr=1e-2)
        for _ in range(20):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(self(batch), target).backward()
            optimiser.step()


class OwnProbes(nn.Module):
    """Reads what networks of any size answer to probes that it learns."""

    reads = "outputs"
    any_size = True

    def __init__(self, layout, probes=4):
        super().__init__()
        self.probes = nn.Parameter(torch.randn(probes, *layout["input"]) / 2)
        self.head = nn.Linear(probes * layout["answer"][-1], 1)

    def forward(self, networks):
        return self.head(networks(self.probes).softmax(-1).flatten(1)).squeeze(-1)


class Prepared(nn.Module):
    """Reads the norm of every tensor, which is computed once."""

    reads = "tensors"

    def __init__(self, layout):
        super().__init__()
        self.net = nn.Linear(layout["tensors"][0], 1)

    @staticmethod
    def prepare(batch):
        return torch.stack([w.flatten(1).norm(dim=1) for w in batch.values()], 1).log1p()

    def forward(self, batch):
        return self.net(batch).squeeze(-1)


class OnInvariants(nn.Module):
    """An MLP on invariants, trained like ours."""

    reads = "invariants"

    def __init__(self, layout):
        super().__init__()
        (shape,) = layout.values()
        self.net = nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.net(batch).squeeze(-1)


EVERY = (
    SetEncoder, WeightGraph, Pictures, Regularised, FitsItself, OwnProbes, Prepared, OnInvariants,
)
