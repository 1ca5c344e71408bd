"""The fused pass as a differentiable function of the weights of many networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_nfn.zoo.training.backends.kernels.arguments import Clock
from transformer_nfn.zoo.training.backends.kernels.launch import Pass


class FusedLoss(torch.autograd.Function):
    """Mean loss of each network on the batch its clock says: ``[networks]``.

    The kernels leave activations in the buffers of ``one``, so backward must come before its
    next forward.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, one: Pass, clock: Clock, threshold: Tensor, scale: Tensor
    ) -> Tensor:
        """Draws dropout and runs the network on a batch of the training set."""
        ctx.one, ctx.clock, ctx.scale = one, clock, scale
        ctx.save_for_backward(weights)
        one.draw(clock, threshold)
        one.forward(weights, clock, "train", scale)
        return one.outcome.loss.sum(0) / one.batch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of every weight, from the activations forward left."""
        (weights,) = ctx.saved_tensors
        ctx.one.backward(weights, ctx.clock, ctx.scale)
        return ctx.one.gradients.weights.sum(0) * grad[:, None], None, None, None, None


def fused_loss(
    weights: Tensor, one: Pass, clock: Clock, threshold: Tensor, scale: Tensor
) -> Tensor:
    """`FusedLoss` with names for its arguments; see `launch.Pass` and `arguments.Clock`."""
    loss: Tensor = FusedLoss.apply(weights, one, clock, threshold, scale)
    return loss
