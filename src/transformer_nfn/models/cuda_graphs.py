"""Training steps captured as CUDA graphs, one per shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
"""Eager steps before a capture, in which libraries initialise."""

Step = Callable[[Tensor], Tensor]
"""One update from the picked networks (gather, forward, backward, optimiser); returns the loss."""


@dataclass(frozen=True)
class CapturedStep:
    """One captured step: its input, the graph, and its output."""

    picks: Tensor
    graph: torch.cuda.CUDAGraph
    loss: Tensor

    def replay(self, picks: Tensor) -> Tensor:
        """Run the update; the returned loss is overwritten by the next one."""
        self.picks.copy_(picks)
        self.graph.replay()
        return self.loss


class GraphSteps:
    """Run steps as CUDA graphs, captured on the first use of a size group or batch size.

    The incomplete last batch of an epoch and every network size have their own graphs, because
    tensor shapes and addresses differ. The graphs share one memory pool, as they never run at the
    same time. A step that cannot be captured runs eagerly, after one warning.

    Args:
        optimisers: of the steps, with ``capturable=True``. Everything a step changes is one of
            their parameters or their state; call `forget` if any of these become other tensors.
    """

    def __init__(self, *optimisers: torch.optim.Optimizer) -> None:
        self.optimisers = optimisers
        self.captured: dict[tuple[Hashable, int], CapturedStep] = {}
        self.refused = False
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, step: Step, picks: Tensor, of: Hashable = 0) -> Tensor:
        """Run ``step`` on ``picks``, ``[…, batch]``; the loss is valid until the next call.

        Args:
            step: the same whenever ``of`` is.
            picks: which networks.
            of: which data set they are picked from.
        """
        if self.refused:
            return step(picks)
        key = of, picks.shape[-1]
        if key not in self.captured:
            with torch.cuda.device(picks.device):
                captured = self._capture(step, picks)
            if captured is None:
                self.refused = True
                self.forget()
                return step(picks)
            self.captured[key] = captured
        return self.captured[key].replay(picks)

    def forget(self) -> None:
        """Drop all graphs; call it when parameters or state have become other tensors."""
        if self.captured:
            torch.cuda.synchronize()
        self.captured.clear()

    def _capture(self, step: Step, picks: Tensor) -> CapturedStep | None:
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self.captured:
            # A pool that no graph uses any more is freed and cannot be shared again.
            self._pool = torch.cuda.graph_pool_handle()
        held = picks.clone(memory_format=torch.contiguous_format)
        graph = torch.cuda.CUDAGraph()
        # The warm-up draws random numbers, which training would miss.
        with no_update(*self.optimisers), torch.random.fork_rng([picks.device]):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    step(held)
            current.wait_stream(self._stream)
            # Gradients created while capturing live in the graph's memory.
            self._drop_gradients()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    loss = step(held)
            except RuntimeError as error:
                # A failed capture leaves its stream current.
                torch.cuda.set_stream(current)
                self._drop_gradients()
                # Ending a failed capture raises too; the first error is the informative one.
                reason = str(error.__context__ or error).strip().split("\n")[0]
                warnings.warn(
                    "the training step cannot be captured as a CUDA graph and runs operation by "
                    f"operation, which is slower: {reason}",
                    stacklevel=2,
                )
                return None
        return CapturedStep(held, graph, loss)

    def _drop_gradients(self) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)


def set_rate(optimiser: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Set the learning rate; where the optimiser reads it from a tensor, in place."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(torch.as_tensor(rate))
        else:
            group["lr"] = rate


@contextmanager
def no_update(*optimisers: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which steps leave parameters and optimiser state unchanged, in the same tensors.

    State created within it is set to zero, as Adam's starts.
    """
    states = [(p, o.state) for o in optimisers for group in o.param_groups for p in group["params"]]
    before = [
        (p.detach().clone(), {k: v.clone() for k, v in state.get(p, {}).items()})
        for p, state in states
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for (parameter, state), (value, entries) in zip(states, before, strict=True):
                parameter.copy_(value)
                for name, entry in state.get(parameter, {}).items():
                    if name in entries:
                        entry.copy_(entries[name])
                    else:
                        entry.zero_()
