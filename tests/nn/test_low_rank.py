"""Low-rank layers: exactly equivariant (tested with the others), linear in the width, no D × D."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_nfn import spaces
from transformer_nfn.nn import Equivariant, Invariant


def block(D: int) -> spaces.WeightSpace:
    return spaces.attention_block(D, 2, 3, 2, 5)


def count(D: int, rank: int | None) -> int:
    layers = Equivariant(block(D), 2, 3, rank=rank), Invariant(block(D), 2, 3, rank=rank)
    return sum(p.numel() for layer in layers for p in layer.parameters())


def test_parameters_grow_linearly_with_the_width() -> None:
    assert count(40, 4) - count(30, 4) == count(30, 4) - count(20, 4)
    # The dense layer's grow with the cube.
    assert count(40, None) - count(30, None) > 1.5 * (count(30, None) - count(20, None))


def test_a_wide_layer_has_few_parameters() -> None:
    with torch.device("meta"):
        layer = Equivariant(spaces.attention_block(4096, 32, 128, 128, 16384), 10, 10, rank=16)
    assert sum(p.numel() for p in layer.parameters()) < 2_000_000


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.seen.add(tuple(x.shape))
        return out


@pytest.mark.parametrize(("rank", "formed"), [(3, False), (None, True)])
def test_no_matrix_of_width_by_width_is_formed(rank: int | None, formed: bool) -> None:
    D = 37
    space = block(D)
    layers = Equivariant(space, 2, 3, rank=rank), Invariant(space, 2, 3, rank=rank)
    weights = space.randn(2, 2)
    with torch.no_grad(), Shapes() as shapes:
        for layer in layers:
            layer(weights)
    # Any tensor in which the width stands twice, alone or merged into a longer axis.
    square = [s for s in shapes.seen if sum(n % D == 0 for n in s) > 1 or D * D in s]
    assert bool(square) == formed


def test_low_rank_has_unit_scale() -> None:
    torch.manual_seed(0)
    space = spaces.attention_block(64, 4, 16, 16, 128)
    out = Equivariant(space, 4, 4, rank=8)(space.randn(4, 4))
    for name, x in out.items():
        assert 0.4 < x.square().mean().sqrt() < 2.5, name
