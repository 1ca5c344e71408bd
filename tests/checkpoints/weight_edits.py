"""Edits of single tensors, and which of those that change a network's outputs nobody sees."""

import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from memory_model import MemoryModel, disguised
from torch import Tensor

from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint

Outputs = Callable[[Mapping[str, Tensor]], Tensor]
"""Outputs of a network from its tensors, in float64."""
CHANGED = 1e-3
"""Least change of outputs that counts, in units of the largest: a fingerprint stores 16 bits, and a
factor on what a norm reads moves outputs by its epsilon, 3e-6 here."""


def edits(name: str, w: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Noise, other numbers, a constant, a factor; along each axis constants, a slice scaled or
    negated, two swapped."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = w.square().mean().sqrt()

    def noise(*shape: int) -> Tensor:
        return size * torch.randn(shape, generator=generator, dtype=w.dtype)

    yield "noise", w + 0.1 * noise(*w.shape)
    yield "1 % noise", w * (1 + 0.01 * torch.randn(w.shape, generator=generator, dtype=w.dtype))
    yield "other numbers", noise(*w.shape)
    yield "a constant", w + 0.3 * size
    yield "a factor", 1.2 * w
    for axis, n in enumerate(w.shape):
        shape = [*w.shape[:axis], 1, *w.shape[axis + 1 :]]
        yield f"constants along axis {axis}", w + 0.3 * noise(*shape)
        at = int(torch.randint(n, (), generator=generator))
        order = torch.arange(n)
        order[[at, at - 1]] = order[[at - 1, at]]
        for way, factor in (("scaled", 1.5), ("negated", -1.0)):
            slice_ = w.select(axis, at)
            yield f"slice {at} of axis {axis} {way}", w.select_scatter(factor * slice_, axis, at)
        yield f"slices {at} and {at - 1} of axis {axis} swapped", w.index_select(axis, order)


def unseen_edits(
    model: MemoryModel, outputs: Outputs, one_in: int = 1, *, hidden: bool = False
) -> list[str]:
    """Edits that change the outputs, and that a fingerprint or `relate` takes for none.

    Args:
        model: in float64; `relate` sees it in float32.
        outputs: of the network.
        one_in: try one edit in so many.
        hidden: `relate` sees a disguise of the edited network.
    """
    before, narrow, fingerprint = outputs(model.tensors), model.to(torch.float32), None
    unseen = []
    for name, tensor in model.tensors.items():
        for edit, changed in edits(name, tensor):
            words = f"{name}: {edit}"
            if zlib.crc32(words.encode()) % one_in:
                continue
            other = model.changed(**{name: changed})
            apart = (outputs(other.tensors) - before).abs().max() / before.abs().max()
            if apart < CHANGED:
                continue
            fingerprint = fingerprint or take_fingerprint(model)
            comparison = compare_fingerprints(fingerprint, take_fingerprint(other))
            if not comparison.changed or comparison.distance == 0:
                unseen.append(f"{words}: same fingerprint")
            shown = other.to(torch.float32)
            relation = relate(narrow, disguised(shown, 3) if hidden else shown)
            if relation.same_function is not False:
                unseen.append(f"{words}: {relation.verdict}")
    return unseen
