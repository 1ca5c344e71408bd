"""Sums over the places of an activated map: in C, in PyTorch, and where there is no compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from transformer_nfn import native_code, spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.nn import Activation, Equivariant, Invariant, ReadThrough, pooled

needs_compiler = pytest.mark.skipif(pooled.library()[0] is None, reason=pooled.library()[1])
SHAPES = [
    # groups, rows, features, batch, j, k
    (1, 1, 1, 1, 1, 1),
    (2, 10, 1, 3, 32, 64),
    (2, 20, 34, 3, 1, 64),
    (1, 13, 7, 4, 5, 67),
    (3, 6, 2, 2, 3, 15),
    (2, 5, 3, 0, 2, 4),
]


def operands(shape: tuple[int, ...], both: bool, dtype: torch.dtype) -> list[Tensor | None]:
    groups, rows, features, batch, j, k = shape
    torch.manual_seed(0)
    sizes = [(rows, features), (features, batch, j, k), (rows, batch, j), (rows, batch, k)]
    made: list[Tensor | None] = [torch.randn(groups, *size, dtype=dtype) for size in sizes]
    return made if both else [*made[:3], None]


def defined(weight: Tensor, x: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
    """The definition, in double precision."""
    y = torch.einsum("gmq,gqbjk->gmbjk", weight.double(), x.double()) + a.double()[..., None]
    return torch.relu(y if c is None else y + c.double()[..., None, :]).sum((-1, -2))


@pytest.fixture
def always_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of any size are done in C."""
    monkeypatch.setattr(pooled, "WORTHWHILE", 0)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_sums_in_c_are_what_is_defined(
    shape: tuple[int, ...], both: bool, dtype: torch.dtype, tolerance: float, always_in_c: None
) -> None:
    given = operands(shape, both, dtype)
    with torch.no_grad():
        found = pooled.pooled(torch.relu, *given)  # type: ignore[arg-type]
    assert found.dtype == dtype
    expected = defined(*given)  # type: ignore[arg-type]
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * scale)


@needs_compiler
def test_operands_may_lie_anyhow_in_memory(always_in_c: None) -> None:
    weight, x, a, c = operands((2, 20, 34, 3, 1, 64), True, torch.float64)
    assert all(t is not None for t in (weight, x, a, c))
    with torch.no_grad():
        found = pooled.pooled(
            torch.relu,
            weight.mT.contiguous().mT[:, 5:],
            x.transpose(1, 2).contiguous().transpose(1, 2),
            a[:, 5:, :, :1].expand(-1, -1, -1, 1),
            c[:, 5:],
        )
    torch.testing.assert_close(found, defined(weight, x, a, c)[:, 5:], rtol=1e-12, atol=1e-12)


@needs_compiler
def test_what_is_not_a_number_is_seen_in_the_sum(always_in_c: None) -> None:
    for place in (0, 66):
        weight, x, a, c = operands((1, 6, 2, 2, 1, 67), True, torch.float32)
        assert x is not None
        x[0, 0, 1, 0, place] = torch.nan
        with torch.no_grad():
            found = pooled.pooled(torch.relu, weight, x, a, c)  # type: ignore[arg-type]
            assert found[:, :, 1].isnan().all()
        assert found[:, :, 0].isfinite().all()


def test_sums_in_portions_and_other_activations() -> None:
    given = operands((2, 3, 4, 2 * pooled.PORTION + 3, 2, 3), True, torch.float64)
    expected = defined(*given)  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(pooled.pooled(torch.relu, *given), expected)  # type: ignore[arg-type]
        leaky = pooled.pooled(lambda y: 0.5 * (y + y.abs()), *given)  # type: ignore[arg-type]
    torch.testing.assert_close(leaky, expected)
    torch.testing.assert_close(pooled.pooled(torch.relu, *given), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.multi_head(4, 2, 3, 2),
        spaces.attention_block(4, 2, 3, 2, 21),
        spaces.grouped_query_block(4, 2, 3, 3, 2, 5),
        spaces.swiglu_block(4, 2, 3, 2, 17),
        spaces.stack(spaces.attention_block(4, 2, 3, 2, 5), 2),
    ],
    ids=lambda space: space.name,
)
@needs_compiler
def test_without_gradients_reading_through_changes_nothing(
    space: spaces.WeightSpace, pool: str, always_in_c: None
) -> None:
    torch.manual_seed(0)
    E = Equivariant(space, 2, 6, groups=2, pool=pool).double()
    act, I = Activation(space), Invariant(space, 6, 8, groups=2, pool=pool).double()  # noqa: E741
    short = ReadThrough(E, act, I)
    weights = space.randn(3, 2, dtype=torch.float64)
    apart = [{n: x[:, i : i + 1] for n, x in weights.items()} for i in range(2)]
    with torch.no_grad():
        expected = I(act(E(weights)))
        assert (short(weights) - expected).abs().max() < 1e-10
        assert (short(*apart) - expected).abs().max() < 1e-10
    with pytest.raises(SpaceError, match="the layers read 2 channels, the weights have 1"):
        short(apart[0])


def test_without_a_compiler_the_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "WORTHWHILE", 0)
    monkeypatch.setattr(native_code, "find_compiler", lambda: None)
    pooled.library.cache_clear()
    try:
        assert pooled.library() == (None, "no C compiler was found")
        given = operands((2, 10, 3, 4, 3, 9), True, torch.float64)
        with torch.no_grad():
            found = pooled.pooled(torch.relu, *given)  # type: ignore[arg-type]
        torch.testing.assert_close(found, defined(*given))  # type: ignore[arg-type]
    finally:
        pooled.library.cache_clear()


def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no licence >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path / "cache"))
    pooled.library.cache_clear()
    try:
        lib, problem = pooled.library()
        assert lib is None
        assert "no licence" in problem
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        monkeypatch.undo()
        pooled.library.cache_clear()
