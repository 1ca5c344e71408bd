"""Training of a list of models: all of one size together, each on its own text and order.

On a GPU one step is captured as a CUDA graph, since small models are bound by kernel launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trained.networks import Kind, Size, Weights, logits, stacked
from trained.text import batches

ADAPTED: dict[Kind, tuple[str, ...]] = {
    "gpt2": ("attn.c_attn.weight",),
    "llama": ("self_attn.q_proj.weight", "self_attn.v_proj.weight"),
    "bert": ("self.query.weight", "self.value.weight"),
}
"""Matrices that a low-rank adapter changes."""


@dataclass(frozen=True)
class Course:
    """What a model goes through: which text, in which order, for how many steps, how fast."""

    text: str
    order: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Options:
    """How a list of models is trained.

    Attributes:
        rows: of a batch; small batches, since steps and not tokens carry a model away from its
            base.
        device: where; "cuda" records a graph.
        dtype: of products.
        masked: share of the tokens of a row that a BERT has to restore; the last id hides them.
        rank: of the adapters that are trained in place of the weights; 0 trains the weights.
        teachers: a model for each whose outputs it learns in place of the text.
    """

    rows: int = 4
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    masked: float = 0.15
    rank: int = 0
    teachers: list[Weights] = field(default_factory=list)


ON_CPU = Options()


def train(
    size: Size,
    models: list[Weights],
    courses: list[Course],
    texts: Mapping[str, Tensor],
    told: Callable[[int, int, float], None] = lambda done, steps, loss: None,
    options: Options = ON_CPU,
) -> tuple[list[Weights], list[float]]:
    """Trains models of one size side by side.

    Args:
        size: of all of them.
        models: where each starts.
        courses: of each; all of the same number of steps and the same rate.
        texts: token ids by the name of the text.
        told: the step, how many there are and the mean loss, now and then.
        options: how.

    Returns:
        The trained models, and the loss of each over the last tenth.
    """
    steps, rate = courses[0].steps, courses[0].rate
    assert all((c.steps, c.rate) == (steps, rate) for c in courses)
    run = _Run(size, models, courses, texts, options)
    late = torch.zeros(len(models), device=options.device)
    warm, tail = max(steps // 20, 1), max(steps // 10, 1)
    for step in range(steps):
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        by_model = run.step(step, rate * min((step + 1) / warm, 1.0) * decay)
        if step >= steps - tail:
            late += by_model / tail
        if step % 50 == 49 or step == steps - 1:
            told(step + 1, steps, float(by_model.mean()))
    W = {n: w.detach().cpu() for n, w in run.weights().items()}
    return [{n: w[i].clone() for n, w in W.items()} for i in range(len(models))], late.tolist()


class _Run:
    """Weights, optimiser and batches of a list of models on their device."""

    def __init__(
        self,
        size: Size,
        models: list[Weights],
        courses: list[Course],
        texts: Mapping[str, Tensor],
        options: Options,
    ) -> None:
        self.size, self.options = size, options
        device = torch.device(options.device)
        self.W = {n: w.to(device) for n, w in stacked(models).items()}
        teachers = stacked(options.teachers) if options.teachers else {}
        self.teachers = {n: w.to(device) for n, w in teachers.items()}
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}
        if options.rank:
            generator = torch.Generator().manual_seed(courses[0].order)
            for name in [n for n in self.W if n.endswith(ADAPTED[size.kind])]:
                m, rows, columns = self.W[name].shape
                first = torch.randn(m, rows, options.rank, generator=generator) / math.sqrt(rows)
                second = torch.zeros(m, options.rank, columns)
                self.adapters[name] = first.to(device), second.to(device)
            self.parameters = [p for pair in self.adapters.values() for p in pair]
        else:
            self.parameters = list(self.W.values())
        for p in self.parameters:
            p.requires_grad_()
        graph = device.type == "cuda"
        groups = [
            {"params": [p for p in self.parameters if p.ndim == 3], "weight_decay": 0.05},
            {"params": [p for p in self.parameters if p.ndim == 2], "weight_decay": 0.0},
        ]
        self.rate = torch.zeros((), device=device)
        self.optimiser = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self.rate,
            betas=(0.9, 0.98),
            fused=True,
            capturable=graph,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate  # the tensor itself: a recorded graph reads it
        self._batches(courses, texts, device)
        self.graph: Any = None
        self.by_model = torch.zeros(len(models), device=device)

    def _batches(
        self, courses: list[Course], texts: Mapping[str, Tensor], device: torch.device
    ) -> None:
        rows, length, steps = self.options.rows, self.size.length, courses[0].steps
        used = sorted({c.text for c in courses})
        first, total = {}, 0
        for name in used:
            first[name], total = total, total + len(texts[name])
        self.tokens = torch.cat([texts[name] for name in used]).to(device)
        starts = [
            first[c.text] + batches(texts[c.text], c.order, steps, rows, length) for c in courses
        ]
        self.starts = torch.stack(starts, 1).to(device)  # [steps, m, rows]
        self.start = self.starts[0].clone()
        self.window = torch.arange(length + 1, device=device)
        if self.size.kind == "bert":
            shape, count = (steps, rows, length), max(round(self.options.masked * length), 1)
            hidden = {c.order: _hidden(c.order, shape, count) for c in courses}
            self.hidden = torch.stack([hidden[c.order] for c in courses], 1).to(device)
            self.at = self.hidden[0].clone()

    def weights(self) -> Weights:
        """As they are, adapters merged."""
        changed = {n: self.W[n] + torch.bmm(*pair) for n, pair in self.adapters.items()}
        return {**self.W, **changed}

    def step(self, step: int, rate: float) -> Tensor:
        """One step of all models; the loss of each."""
        self.start.copy_(self.starts[step])
        if self.size.kind == "bert":
            self.at.copy_(self.hidden[step])
        self.rate.fill_(rate)
        if self.options.device == "cpu":
            self._update()
        elif step < 3:  # before a graph is recorded its kernels and the optimiser's state must be
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._update()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.optimiser.zero_grad(set_to_none=True)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self._update(keep=True)
            self.graph.replay()
        return self.by_model

    def _update(self, keep: bool = False) -> None:
        if not keep:
            self.optimiser.zero_grad(set_to_none=True)
        losses = self._losses()
        losses.sum().backward()  # a sum: no model's gradient depends on how many there are
        for p in self.parameters:
            assert p.grad is not None
            size = torch.linalg.vector_norm(p.grad.flatten(1), dim=1).clamp_min(1.0)
            p.grad /= size.reshape(-1, *[1] * (p.ndim - 1))  # per tensor and model
        self.optimiser.step()
        self.by_model.copy_(losses.detach())

    def _losses(self) -> Tensor:
        ids = self.tokens[self.start[..., None] + self.window]
        at = self.at if self.size.kind == "bert" else None
        if at is None:
            ids, truth = ids[..., :-1], ids[..., 1:]
        else:
            ids = ids[..., :-1]
            truth = ids.gather(2, at)
            ids = ids.scatter(2, at, self.size.vocabulary - 1)
        out = logits(self.size, self.weights(), ids, self.options.dtype, at)
        if self.teachers:
            with torch.no_grad():
                goal = logits(self.size, self.teachers, ids, self.options.dtype, at).softmax(-1)
            each = -(goal * out.log_softmax(-1)).sum(-1)
        else:
            each = F.cross_entropy(out.flatten(0, 2), truth.flatten(), reduction="none")
        return each.reshape(len(ids), -1).mean(1)


def _hidden(order: int, shape: tuple[int, int, int], count: int) -> Tensor:
    """Positions that are hidden in each row of each step, ``[steps, rows, count]``."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(order + 1))
    return drawn.topk(count).indices
