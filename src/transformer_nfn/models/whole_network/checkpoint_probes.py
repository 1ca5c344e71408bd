"""Probes of checkpoints of any family: images, mixtures of tokens or vectors, and the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import Transformer
from transformer_nfn.functional.transformer import embed, logits, run_stack
from transformer_nfn.models.batch import Batch, RowLayout
from transformer_nfn.models.whole_network.probes import Probes

LENGTH = 24
"""Most tokens of a probe."""
MOST_TOKENS = 512
"""Tokens of the vocabulary that probes are mixed of."""
SHARPNESS = 8.0
"""Initial difference of the logit of one token of a mixture from all others."""
CHUNK = 16
"""Networks at a time where nothing is differentiated; fewer if they return very many logits."""
MOST_NUMBERS = 1 << 26


@dataclass(frozen=True)
class ProbeFormat:
    """What networks read and return; networks of one format share their probes.

    Attributes:
        inputs: kind of the inputs.
        shape: of one input: channels, height and width of an image; length and size of the
            vocabulary, or of a vector.
        outputs: classes, or tokens of a language model.
        language: whether there is an output for every token of the vocabulary at every position.
        causal: whether tokens see only those before them.
    """

    inputs: Literal["images", "tokens", "vectors"]
    shape: tuple[int, ...]
    outputs: int
    language: bool = False
    causal: bool = False

    @staticmethod
    def of(layout: RowLayout) -> ProbeFormat:
        """The format of a network; an error says why it cannot be probed.

        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("format")) as model:
        ...     description = model.description
        >>> ProbeFormat.of(RowLayout(description.tensors, description)).language
        True
        """
        description = layout.description
        assert description is not None, "probes of checkpoints need a family"
        tensors, family = description.tensors, description.family
        inputs: Literal["images", "tokens", "vectors"]
        shape: tuple[int, ...]
        if description.inputs == "audio":
            raise SpaceError(f"a {family} reads audio, of which there are no probes")
        first = sum(description.has(n) for n in ("cls", "dist"))
        if description.inputs == "patches" and description.side > 1:
            patches = tensors["position"][0] - first if description.has("position") else 16
            grid = math.isqrt(patches)
            if grid**2 != patches:
                raise SpaceError(
                    f"probes of a {family} are square images, expected a square number of patches, "
                    f"found {patches}"
                )
            side = grid * description.side
            inputs, shape = "images", (description.channels, side, side)
        else:
            tables = [description.of_stack(stack, "position") for stack in description.stacks]
            tables += ["kept.position"] if description.has("kept.position") else []
            start = description.position_offset + first
            rows = [tensors[name][0] - start for name in tables if name]
            inputs = "tokens" if description.inputs == "tokens" else "vectors"
            shape = (min([LENGTH, *rows]), description.input_size or 0)
        blank = torch.empty(1, *shape, device="meta")
        weights = {name: torch.empty(size, device="meta") for name, size in tensors.items()}
        out = _logits(description, weights, blank)
        language = inputs == "tokens" and out.ndim == 3 and out.shape[-1] == shape[1]
        causal = description.stacks[-1].blocks[-1].attention.causal
        return ProbeFormat(inputs, shape, out.shape[-1], language, causal)

    @property
    def text(self) -> str:
        """The format in words."""
        if self.inputs == "images":
            what = f"images of {' × '.join(map(str, self.shape))}"
        elif self.inputs == "tokens":
            what = f"{self.shape[0]} tokens of {self.shape[1]:,}"
        else:
            what = f"{self.shape[0]} vectors of width {self.shape[1]}"
        return f"{what} and returns {self.outputs:,} logits" + " a token" * self.language


def checkpoint_outputs(
    batch: Batch,
    inputs: Tensor,
    ids: Tensor | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits of every network on every input, ``[n, inputs, …]``, or what is read of them.

    Args:
        batch: checkpoints of any family.
        inputs: ``[inputs, *ProbeFormat.shape]``.
        ids: tokens of the vocabulary that mixtures are of; all if not given.
        read: takes logits ``[n, inputs, …]`` to features ``[n, …]``.
    """
    parts, order = [], []
    for rows, alone in batch.by_size():
        description, tensors = alone.layout.description, alone.views
        assert description is not None
        # No probe holds a token that is dropped.
        plain = replace(description, dropped_token=None)
        run = vmap(lambda weights, x, d=plain: _logits(d, weights, x, ids), in_dims=(0, None))
        count = len(next(iter(tensors.values())))
        numbers = len(inputs) * (plain.vocab or 1) * inputs.shape[1]
        size = count if torch.is_grad_enabled() else max(1, min(CHUNK, MOST_NUMBERS // numbers))
        for at in range(0, count, size):
            out = run({name: w[at : at + size] for name, w in tensors.items()}, inputs)
            parts.append(out if read is None else read(out))
        order.append(rows)
    out = torch.cat(parts)
    if len(order) == 1:
        return out
    rows = torch.cat([each for each in order if isinstance(each, Tensor)])
    return torch.empty_like(out).index_copy(0, rows, out)


def _logits(
    description: Transformer,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    ids: Tensor | None = None,
) -> Tensor:
    """Output of one network; encoder and decoder read the same probes."""
    read = weights
    if ids is not None:
        table = "kept.token" if description.has("kept.token") else "token"
        read = {**weights, table: weights[table][ids.clamp(0, weights[table].shape[0] - 1)]}
    memory = None
    for stack in description.stacks:
        x = embed(description, stack, read, inputs)
        memory = run_stack(description, stack, weights, x, memory=memory)
    assert memory is not None
    return logits(description, weights, memory)


class ImageProbes(Probes):
    """Learned images, ``[count, channels, height, width]``, between -1 and 1, which start gray.

    >>> ImageProbes(4, (1, 8, 8), classes=2, rank=3, groups=2)().shape
    torch.Size([4, 1, 8, 8])
    """

    def __init__(
        self, count: int, shape: tuple[int, ...], classes: int, rank: int, *, groups: int = 1
    ) -> None:
        channels, *sides = shape
        pixels = math.prod(sides)
        super().__init__(count, channels, pixels, classes, rank, bounded=True, groups=groups)
        self.sides = sides
        nn.init.zeros_(self.base)

    def forward(self) -> Tensor:
        """The probes."""
        images: Tensor = super().forward().unflatten(-1, self.sides)
        return images


class TokenProbes(nn.Module):
    """Learned mixtures of tokens, ``[count, length, tokens]``; they start near single tokens.

    >>> probes = TokenProbes(4, length=3, tokens=5, classes=2)
    >>> probes().sum(-1).allclose(torch.ones(4, 3))
    True
    """

    labels: Tensor

    def __init__(
        self, count: int, length: int, tokens: int, classes: int, *, groups: int = 1
    ) -> None:
        super().__init__()
        self.groups = groups
        self.mix = nn.Parameter(torch.randn(count, length, tokens) / SHARPNESS)
        self.register_buffer("labels", torch.arange(count) % classes, persistent=False)
        self.set_ids(torch.randint(tokens, (count, length)))

    @torch.no_grad()
    def set_ids(self, ids: Tensor, *, exactly: bool = False) -> None:
        """Move to single tokens ``[count, length]``, or only near them."""
        if exactly:
            self.mix.zero_()
        step = torch.full_like(self.mix, SHARPNESS if exactly else 1.0)
        self.mix.scatter_add_(2, ids.unsqueeze(-1), step)

    def forward(self) -> Tensor:
        """The probes."""
        mixtures: Tensor = (SHARPNESS * self.mix).softmax(-1)
        return mixtures
