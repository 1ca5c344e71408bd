"""The paper's augmentation: each network kept, and beside it the same function in other weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from transformer_nfn.prediction.data import Dataset, Parts, joined

MAX_CONDITION = 1e4
# The elements of each part have a seed of their own, counted from that of the augmentation.
TRAIN_PART, VAL_PART, TEST_PART = range(3)


def disguised(data: Dataset, bound: float, seed: int) -> Dataset:
    """Every block of every network moved by a random group element of its own.

    Elements are drawn and act in float64; the result is rounded to the weights' own dtype.

    Args:
        data: the networks.
        bound: matrix entries are uniform on ``[-bound, bound]`` (Table 6: 1, 10, 100).
        seed: of the elements.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for block in data.network["blocks"]:
        element = data.block_space.group.random(
            generator,
            batch=len(data),
            entries=(-bound, bound),
            max_condition=MAX_CONDITION,
            device=data.accuracy.device,
        )
        blocks.append(element.act(block))
    return replace(data, network={**data.network, "blocks": blocks})


def augmented(parts: Parts, bound: float, seed: int = 0) -> Parts:
    """Two-fold augmentation of every part; the originals are kept.

    With ``bound`` 0 the second half is the first again: as many steps, nothing new to see.
    """
    train, val, test = (
        joined(part, disguised(part, bound, seed + which) if bound else part)
        for which, part in (
            (TRAIN_PART, parts.train),
            (VAL_PART, parts.val),
            (TEST_PART, parts.test),
        )
    )
    return Parts(train, val, test, parts.more)
