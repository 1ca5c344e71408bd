"""How does a training step run as one launch? Captured once per shape, as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
"""Steps before a capture: libraries set themselves up in them, which a capture cannot hold."""

Step = Callable[[Tensor], Tensor]
"""A whole update from the picked networks: gather, forward, backward, optimiser; the loss."""


@dataclass(frozen=True)
class CapturedStep:
    """One captured step: what it reads, the graph, and where it leaves the loss."""

    picks: Tensor
    graph: torch.cuda.CUDAGraph
    loss: Tensor

    def replay(self, picks: Tensor) -> Tensor:
        """Makes the update; the loss is overwritten by the next one."""
        self.picks.copy_(picks)
        self.graph.replay()
        return self.loss


class GraphSteps:
    """Runs a step as a CUDA graph, captured the first time a kind or a batch size comes.

    A last incomplete batch of an epoch gets a graph of its own: captured in less time than it
    would take over the epochs of a training to launch it operation by operation. So does every
    kind of networks, whose tensors have shapes and places of their own. The graphs share their
    memory, which they may because they never run at the same time.

    What cannot be captured is said in a warning, once, and runs operation by operation.

    Args:
        optimiser: of the step, made with ``capturable=True``; everything the step changes is a
            parameter of it or its state, and nothing of that may be replaced by another tensor
            afterwards (see `forget`).
    """

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser
        self.captured: dict[tuple[Hashable, int], CapturedStep] = {}
        self.refused = False
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, step: Step, picks: Tensor, of: Hashable = 0) -> Tensor:
        """One update by ``step`` on ``picks``, ``[…, batch]``; the loss, valid until the next.

        Args:
            step: the same whenever ``of`` is.
            picks: which networks.
            of: which networks they are picked from.
        """
        if self.refused:
            return step(picks)
        size = of, picks.shape[-1]
        if size not in self.captured:
            with torch.cuda.device(picks.device):
                made = self._capture(step, picks)
            if made is None:
                self.refused = True
                self.forget()
                return step(picks)
            self.captured[size] = made
        return self.captured[size].replay(picks)

    def forget(self) -> None:
        """Captures anew when needed, for when parameters or state have become other tensors."""
        if self.captured:
            torch.cuda.synchronize()
        self.captured.clear()

    def _capture(self, step: Step, picks: Tensor) -> CapturedStep | None:
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self.captured:
            # Memory that no graph uses any more is given back and cannot be shared again.
            self._pool = torch.cuda.graph_pool_handle()
        held = picks.clone(memory_format=torch.contiguous_format)
        graph = torch.cuda.CUDAGraph()
        with no_update(self.optimiser):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    step(held)
            current.wait_stream(self._stream)
            # Gradients made while capturing lie in the graph's own memory.
            self.optimiser.zero_grad(set_to_none=True)
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    loss = step(held)
            except RuntimeError as error:
                # A capture that breaks off leaves its stream the current one.
                torch.cuda.set_stream(current)
                self.optimiser.zero_grad(set_to_none=True)
                # Ending a broken capture fails too, and tells less than what broke it.
                reason = str(error.__context__ or error).strip().split("\n")[0]
                warnings.warn(
                    "the training step cannot be captured as a CUDA graph and runs operation by "
                    f"operation, which is slower: {reason}",
                    stacklevel=2,
                )
                return None
        return CapturedStep(held, graph, loss)


@contextmanager
def no_update(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Steps made within it leave parameters and state as they were, in the same tensors.

    State that is only made within it starts from zero, as Adam's does.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    before = [
        (p.detach().clone(), {k: v.clone() for k, v in optimiser.state.get(p, {}).items()})
        for p in parameters
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, (value, entries) in zip(parameters, before, strict=True):
                parameter.copy_(value)
                for name, entry in optimiser.state.get(parameter, {}).items():
                    if name in entries:
                        entry.copy_(entries[name])
                    else:
                        entry.zero_()
