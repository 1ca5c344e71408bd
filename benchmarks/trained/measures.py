"""What do simpler measures of likeness say of the same pairs? And how well does one separate?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model


def raw_cosine(A: Model, B: Model) -> float:
    """Of all weights as one vector, as they lie in the file."""
    return _cosine(*(torch.cat([m[name].flatten() for name in A.names]) for m in (A, B)))


def embedding_gram(A: Model, B: Model) -> float:
    """Of the Gram matrices of the token embeddings, which no rotation of the stream changes."""
    grams = []
    for model in (A, B):
        E = model["token"].double()
        if model.description.norm == "layer":
            E = E - E.mean(1, keepdim=True)  # nobody reads it
        E = E - E.mean(0)  # a vector may move between tokens and positions
        grams.append((E @ E.mT).flatten())
    return _cosine(*grams)


def norm_vectors(A: Model, B: Model) -> float:
    """Of the gains of all norms, each in order of size, so that no permutation matters."""
    gains = [name for name in A.names if name.endswith(".g")]
    return _cosine(*(torch.cat([m[n].abs().sort().values for n in gains]) for m in (A, B)))


def spectra(A: Model, B: Model) -> float:
    """Of the singular values of every matrix, heads in any order."""
    total, count = 0.0, 0
    for name, shape in A.names.items():
        if len(shape) > 1:
            total += _cosine(*(_singular_values(m[name]) for m in (A, B)))
            count += 1
    return total / count


BASELINES: dict[str, Callable[[Model, Model], float]] = {
    "raw cosine": raw_cosine,
    "Gram of embeddings": embedding_gram,
    "norm vectors": norm_vectors,
    "spectra": spectra,
}


def auroc(above: Sequence[float], below: Sequence[float]) -> float:
    """How often a value of the first is above one of the second; ties count half."""
    if not above or not below:
        return float("nan")
    a, b = torch.tensor(above)[:, None], torch.tensor(below)
    return float(((a > b).double() + 0.5 * (a == b)).mean())


def _singular_values(w: Tensor) -> Tensor:
    """Of a matrix, or of each head's: ``[h, a, b]``."""
    return torch.linalg.svdvals(w.double()).flatten().sort().values


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))
