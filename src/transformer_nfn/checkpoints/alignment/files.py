"""Alignment of checkpoint files: written beside, run against A, only then named."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment.whole import ROUNDS, Alignment
from transformer_nfn.checkpoints.families import Model, open_model, write_model
from transformer_nfn.checkpoints.proof.witness import Perturbed
from transformer_nfn.errors import TransformerNFNError, WriteError
from transformer_nfn.functional.description import Transformer
from transformer_nfn.functional.transformer import Weights, hidden_states, logits
from transformer_nfn.io.files import made_folder, take_name

LENGTH = 8
ARITHMETIC = 1e-13
"""Relative error of outputs that float64 arithmetic explains, however weights are stored."""
ALLOWED = 32.0
"""So many times what rounding its weights changes, A's outputs may change by being moved."""


@dataclass(frozen=True)
class Aligned:
    """What `align` did.

    Attributes:
        before: relative distance ``‖A − B‖ / ‖B‖`` over all weights.
        after: likewise after moving A.
        parts: both, of the ends and of each block.
        rounds: how many.
        action: what acted on the stream.
        difference: relative difference of the outputs of A and of the file that was written, on
            random inputs in float64; None where nothing was written.
        noise: what moving A's weights within their rounding changes, likewise.
        tensors: what A was moved to, by canonical name; None where it was written.
    """

    before: float
    after: float
    parts: dict[str, tuple[float, float]]
    rounds: int
    action: str
    difference: float | None = None
    noise: float | None = None
    tensors: dict[str, Tensor] | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything but tensors."""
        return {
            "distance_before": self.before,
            "distance_after": self.after,
            "parts": {name: list(pair) for name, pair in self.parts.items()},
            "rounds": self.rounds,
            "stream": self.action,
            "difference_of_outputs": self.difference,
            "rounding_of_outputs": self.noise,
        }


def align(
    A: Model,
    B: Model,
    out: str | Path | None = None,
    *,
    rounds: int = ROUNDS,
    untie: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Aligned:
    """Moves A along its orbit as close to B as it gets, and writes it in A's layout and dtype.

    Args:
        A: an open model.
        B: another of the same family and sizes; vocabularies may differ.
        out: where to, a new folder if A is one, else a new file; None keeps the tensors.
        rounds: at most.
        untie: a tied model is written untied, which lets more act on its stream.
        progress: told the name of each block that is matched.
    """
    place = None if out is None else free_place(Path(out))
    walk = Alignment(A, B, rounds=rounds, untie=untie, progress=progress)
    if place is None:
        tensors = {name: w.to(torch.float64) for name, w in walk}
        return _told(walk, tensors=tensors)
    try:
        with (
            made_folder(place.parent),
            tempfile.TemporaryDirectory(dir=place.parent, prefix=".align-") as folder,
        ):
            beside = Path(folder) / place.name
            write_model(A, walk, beside, untied=untie)
            with open_model(beside, A.options) as moved:
                difference, noise = compare_outputs(A, moved)
            if difference > ALLOWED * max(noise, ARITHMETIC):
                raise TransformerNFNError(
                    f"A as moved does not compute what A does: outputs differ by "
                    f"{difference:.1e}, rounding explains {noise:.1e}; nothing was written"
                )
            take_name(beside, place)
    except OSError as error:
        raise WriteError(f"'{place}' cannot be written: {error.strerror or error}") from error
    return _told(walk, difference=difference, noise=noise)


def _told(walk: Alignment, **more: Any) -> Aligned:
    before, after = walk.distances
    parts = {}
    for name, size in walk.sizes.items():
        pair = (walk.before.get(name, 0.0), walk.after.get(name, 0.0))
        parts[name] = tuple(float((x / max(size, 1e-300)) ** 0.5) for x in pair)
    return Aligned(before, after, parts, walk.rounds, walk.action, **more)  # type: ignore[arg-type]


def free_place(out: Path) -> Path:
    """Refuses a place where something is; an empty folder is nothing."""
    taken = any(out.iterdir()) if out.is_dir() else out.exists()
    if taken or out.is_symlink():
        raise WriteError(f"'{out}' is already there: name a new place")
    return out


def compare_outputs(A: Model, moved: Model) -> tuple[float, float]:
    """Relative difference of two models' outputs, and what rounding A's weights changes."""
    inputs, decoder = _inputs(A.about)
    expected = _outputs(A.about, A, inputs, decoder)
    size = max(float(expected.norm()), 1e-300)
    found = _outputs(moved.about, moved, inputs, decoder)
    shaken = _outputs(A.about, Perturbed(A), inputs, decoder)
    return tuple(float((x - expected).norm()) / size for x in (found, shaken))  # type: ignore[return-value]


def _outputs(about: Transformer, w: Weights, inputs: Tensor, decoder: Tensor | None) -> Tensor:
    x = hidden_states(about, w, inputs, decoder=decoder, dtype=torch.float64)
    return logits(about, w, x)


def _inputs(about: Transformer) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    if about.inputs == "vectors":
        shape = (1, LENGTH, about.width)
        return torch.randn(shape, generator=generator, dtype=torch.float64), None
    if about.inputs == "patches":
        rows = about.tensors["position"][0] - sum(about.has(n) for n in ("cls", "dist"))
        side = about.side * round(rows**0.5)
        pixels = torch.randn(
            (1, about.channels, side, side), generator=generator, dtype=torch.float64
        )
        return pixels, None
    length = LENGTH
    if about.has("position"):
        length = min(length, about.tensors["position"][0] - about.position_offset)
    ids = torch.randint(0, about.vocab or 1, (2, length), generator=generator)
    return ids, ids.flip(1) if len(about.stacks) > 1 else None
