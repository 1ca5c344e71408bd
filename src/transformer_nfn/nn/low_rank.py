"""Layers of low rank: free axes of width D are read and written with parameters linear in D."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import Tensor, nn

from transformer_nfn.nn.levels import RANK, Target
from transformer_nfn.nn.sources import Source
from transformer_nfn.spaces import WeightSpace

SKIP_VARIANCE = 0.5
"""Initial variance of what passes a layer beside its dictionaries."""


class Dictionaries(nn.Module):
    """R vectors on every free axis, for reading: ``z_r = Σ_s ⟨u_rᵀ W_Q^s, v_rᵀ W_K^s⟩``.

    No D×D matrix is formed: each factor of a product is projected first.

    Args:
        rank: R.
    """

    def __init__(self, sources: Sequence[Source], rank: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterDict()
        for source in sources:
            for label in source.free:
                if label in source.dense:
                    vectors = nn.Parameter(torch.empty(rank, source.sizes[label]))
                    self.vectors[_key(source.name, label)] = vectors

    def reset_parameters(self) -> None:
        """Initialise the dictionaries so that reading keeps unit scale."""
        for vectors in self.vectors.values():
            nn.init.normal_(vectors, 0, vectors.shape[1] ** -0.5)

    def forward(self, source: Source, label: str) -> Tensor:
        """The dictionary ``[R, size]`` for one free label of a source."""
        vectors: Tensor = self.vectors[_key(source.name, label)]
        return vectors


class Writers(nn.Module):
    """R vectors on every free axis, for writing, and a scalar skip for each tensor.

    ``E(W)_k = Σ_r p_r(k) y_r + α W_k``, with α of shape ``[e, d]``.

    Args:
        rank: R. in_channels: d. out_channels: e.
    """

    def __init__(self, space: WeightSpace, rank: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.rank = rank
        self.vectors = nn.ParameterDict()
        self.skips = nn.ParameterDict()
        self.words: dict[str, str] = {}
        for spec in space.tensors.values():
            free = space.free_axes(spec.name)
            if not free:
                continue
            letters = dict(zip((*dict.fromkeys(spec.axes), RANK), ascii_letters[2:], strict=False))
            rest = "".join(letters[a] for a in spec.axes if a not in free)
            inputs = ["AB" + rest + letters[RANK]]
            for axis in free:
                vectors = nn.Parameter(torch.empty(rank, space.axes[axis].size))
                self.vectors[_key(spec.name, axis)] = vectors
                inputs.append(letters[RANK] + letters[axis])
            result = "AB" + "".join(letters[a] for a in spec.axes)
            self.words[spec.name] = f"{','.join(inputs)}->{result}"
            if spec.name not in space.shifted:
                skip = nn.Parameter(torch.empty(out_channels, in_channels))
                self.skips[_key(spec.name)] = skip
        self.free = {name: space.free_axes(name) for name in space.tensors}

    def reset_parameters(self) -> None:
        """Initialise dictionaries and skips."""
        for name, free in self.free.items():
            for axis in free:
                # The product over a tensor's free axes has variance 1/R, so the sum has 1.
                std = self.rank ** (-0.5 / len(free))
                nn.init.normal_(self.vectors[_key(name, axis)], 0, std)
        for skip in self.skips.values():
            nn.init.normal_(skip, 0, (SKIP_VARIANCE / skip.shape[1]) ** 0.5)

    def forward(self, target: Target, y: Tensor, x: Tensor) -> Tensor:
        """From ``[b, e, *axes, R]`` to the tensor; ``x`` is the same tensor of the input."""
        if target.name not in self.words:
            return y
        vectors = [self.vectors[_key(target.name, a)] for a in self.free[target.name]]
        out = torch.einsum(self.words[target.name], y, *vectors)
        key = _key(target.name)
        if key not in self.skips:
            return out
        skip: Tensor = self.skips[key]
        if skip.shape[1] == 1:
            skipped = x * skip.view(-1, *[1] * (x.ndim - 2))
        else:
            skipped = torch.einsum("ed,bd...->be...", skip, x)
        # Without gradients the sum is formed in place: it is as large as a network.
        return out + skipped if torch.is_grad_enabled() else out.add_(skipped)


def _key(*parts: str) -> str:
    # Parameter names must not contain a dot.
    return "/".join(parts).replace(".", "_")
