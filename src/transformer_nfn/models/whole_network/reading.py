"""What networks answer, as numbers that a small reader can judge them by."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.models.whole_network.answers import Answers

RAREST = 8.0
"""Logarithms end here: what is rarer, or larger, is as good as impossible."""
SAME = 1e-3
"""How sure a network is of a class differs from probe to probe by no more: it answers all alike."""


def answer_width(probes: int, classes: int) -> int:
    """How many numbers `read_answers` gives, whatever the width, heads and depth of networks."""
    return 2 * probes * classes + 2 * probes + 1


def read_answers(given: Answers, *, logarithms: bool, answers_first: bool = False) -> Tensor:
    """Answers as numbers of middling size, ``[networks, answer_width]``.

    How sure a network is of every class, its logits at scale 1, that scale, and how alike tokens
    are in the mean over blocks and behind the last.

    Args:
        given: what the networks answer.
        logarithms: whether sureness is a probability's logarithm, not the probability.
        answers_first: whether tokens count as alike where all answers are: the directions of
            tokens that a dead block writes are rounding.
    """
    logits = given.logits - given.logits.mean(-1, keepdim=True)
    size = (logits.square().mean((1, 2), keepdim=True) + 1e-12).sqrt()
    if logarithms:
        sure = given.logits.log_softmax(-1).clamp(min=-RAREST) / 2 + 1
    else:
        sure = 3 * (given.logits.softmax(-1) - 1 / logits.shape[-1])
    alike = torch.cat([given.alike.mean(-1), given.alike[..., -1]], -1)
    if answers_first:
        alike = 1 - _told_apart(sure)[:, None] * (1 - alike)
    return torch.cat(
        [
            sure.flatten(1),
            (logits / size).flatten(1),
            size[:, 0].log().clamp(-RAREST, RAREST),
            alike,
        ],
        -1,
    )


def told_apart(read: Tensor, probes: int, classes: int) -> Tensor:
    """Whether networks answer different probes differently, ``[networks]``: 0 if alike, or 1.

    Args:
        read: what `read_answers` gave.
        probes: how many there are.
        classes: of the networks' task.
    """
    return _told_apart(read[:, : probes * classes].unflatten(1, (probes, classes)))


def _told_apart(sure: Tensor) -> Tensor:
    spread = sure.var(1, correction=0).mean(-1)
    return spread / (spread + SAME**2)
