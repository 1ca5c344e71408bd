"""The network of the Small Transformer Zoo: its forward, its weight space and its file layout.

``x = X W + b + positions``; in each block ``x = MultiHead(LN(x))`` and ``x = MLP(LN(x))``; then
``LN``, the mean over tokens, two linear maps with a ReLU between. LayerNorms have no affine part,
and there are no residuals, so each width axis between two blocks is permuted on its own: only the
first one is fixed, by the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn.functional.architecture import LENGTHS, Architecture, Rescaling, Vectors
from transformer_nfn.functional.blocks import sinusoids
from transformer_nfn.io.layout import Naming
from transformer_nfn.spaces import Axis, WeightSpace, attention_block, stack
from transformer_nfn.spaces.axis import under_prefix

NAME = "small_transformer"
EPS = 1e-5
"""Of the LayerNorms, PyTorch's default."""
Drop = Callable[[Tensor, int], Tensor]


def small_transformer(
    tokens: int,
    classes: int,
    patch: int,
    d_model: int = 32,
    heads: int = 2,
    d_ff: int = 64,
    blocks: int = 2,
    *,
    positions: Tensor | None = None,
) -> Architecture:
    """The network of the Small Transformer Zoo.

    Args:
        tokens: positions there are at most (images always fill them).
        classes: logits.
        patch: pixels in a patch, or 0 where the input is word vectors of width ``d_model``.
        d_model: D.
        heads: of width ``d_model // heads``.
        d_ff: neurons of each block.
        blocks: how many.
        positions: ``[tokens, d_model]``, where they are not the sinusoids (a zoo of imported
            files keeps theirs, `Zoo.positions`).

    >>> small_transformer(tokens=49, classes=10, patch=16).space.num_weights
    18506
    """
    sizes = dict(
        tokens=tokens,
        classes=classes,
        patch=patch,
        d_model=d_model,
        heads=heads,
        d_ff=d_ff,
        blocks=blocks,
    )
    return network_architecture(_space(sizes), positions)


def _space(sizes: Mapping[str, int]) -> WeightSpace:
    """Tensors ``embedding.W``, ``blocks.0.W_Q``, …, ``classifier.b_2``."""
    D, n = sizes["d_model"], sizes["blocks"]
    d_head = D // sizes["heads"]
    block = attention_block(D, sizes["heads"], d_head, d_head, sizes["d_ff"])
    inner = stack(block, n, between="permuted")
    first, last = "stream0", f"stream{n}"
    axes = {**inner.axes, last: Axis.perm(last, D)}
    tensors: dict[str, str] = {}
    if sizes["patch"]:
        axes = {"patch": Axis.free("patch", sizes["patch"]), **axes}
        tensors |= {"embedding.W": f"patch {first}", "embedding.b": first}
    for name, spec in inner.tensors.items():
        tensors[f"blocks.{name}"] = " ".join(spec.words())
    axes |= {"hidden": Axis.perm("hidden", D), "class": Axis.free("class", sizes["classes"])}
    tensors |= {"classifier.W_1": f"{last} hidden", "classifier.b_1": "hidden"}
    tensors |= {"classifier.W_2": "hidden class", "classifier.b_2": "class"}
    return WeightSpace.build(NAME, axes.values(), tensors, architecture=NAME, options=sizes)


def network_architecture(space: WeightSpace, positions: Tensor | None = None) -> Architecture:
    """The architecture of a space that `small_transformer` made; its options say all sizes."""
    sizes: dict[str, int] = dict(space.options)
    images, T = sizes["patch"] > 0, sizes["tokens"]
    where = sinusoids(T, sizes["d_model"]) if positions is None else positions

    lengths = (T,) if images else tuple(n for n in LENGTHS if n <= T)
    width = sizes["patch"] or sizes["d_model"]
    return Architecture(
        space,
        partial(_forward, positions=where),
        Vectors(width=width, lengths=lengths),
        _naming(sizes, where),
        freedoms=_scales(sizes["blocks"]),
    )


def zoo_logits(
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    positions: Tensor,
    *,
    heads: int | None = None,
    lengths: Tensor | None = None,
    drop: Drop | None = None,
    observe: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Logits ``[networks, batch, classes]`` of every network on its own batch.

    The one forward of the zoo's network in PyTorch; the C and Triton code is tested against it.

    Args:
        weights: ``[networks, *axes]`` by the names of `small_transformer`; the three matrices of
            an attention may be fused into ``W_QKV [networks, D, 3·D]``, with ``W_O`` as
            ``[networks, D, D]``.
        inputs: patches ``[networks, batch, tokens, patch]`` or word vectors (last axis
            ``d_model``); a leading axis of 1 gives every network the same batch.
        positions: ``[≥ tokens, d_model]``.
        heads: needed where matrices are fused.
        lengths: for text, ``int [networks]``: how far each network's batch is padded. Tokens
            past it do not exist for that network; None where all are as long as ``inputs``.
        drop: called with activations and the index of the dropout site: after the embedding, and
            after the attention and the MLP of each block.
        observe: called with the output ``[networks, batch, tokens, D]`` of each block.

    >>> network = small_transformer(tokens=4, classes=3, patch=2, d_model=8)
    >>> weights = {name: w[:, 0] for name, w in network.space.randn(5).items()}
    >>> zoo_logits(weights, torch.randn(1, 6, 4, 2), sinusoids(4, 8)).shape
    torch.Size([5, 6, 3])
    """
    M, D = weights["classifier.W_1"].shape[:2]
    B, T = inputs.shape[1:3]
    x = inputs.flatten(1, 2)
    if "embedding.W" in weights:
        x = torch.baddbmm(
            weights["embedding.b"][:, None], x.expand(M, -1, -1), weights["embedding.W"]
        )
    x = x.unflatten(1, (B, T)) + positions[:T]
    mask, token_weights = _token_masks(lengths, M, B, T, x)
    x = drop(x.expand(M, -1, -1, -1), 0) if drop else x
    i = 0
    while f"blocks.{i}.W_O" in weights:
        w = under_prefix(weights, f"blocks.{i}.")
        # Word vectors that all networks share are normalised once.
        x = normalised(x).flatten(1, 2).expand(M, -1, -1)
        qkv = torch.bmm(x, _fused(w))
        H = w["W_Q"].shape[1] if heads is None else heads
        parts = qkv.view(M * B, T, -1).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        W_O = w["W_O"].reshape(M, -1, D)
        x = torch.bmm(mixed.reshape(M, B * T, -1), W_O).unflatten(1, (B, T))
        x = drop(x, 1 + 2 * i) if drop else x
        x = normalised(x).flatten(1, 2)
        x = torch.baddbmm(w["b_A"][:, None], x, w["W_A"]).relu()
        x = torch.baddbmm(w["b_B"][:, None], x, w["W_B"]).unflatten(1, (B, T))
        if observe:
            observe(x)
        x = drop(x, 2 + 2 * i) if drop else x
        i += 1
    x = normalised(x)
    x = x.mean(2) if token_weights is None else (x * token_weights).sum(2)
    x = torch.baddbmm(weights["classifier.b_1"][:, None], x, weights["classifier.W_1"]).relu()
    return torch.baddbmm(weights["classifier.b_2"][:, None], x, weights["classifier.W_2"])


def normalised(x: Tensor) -> Tensor:
    """LayerNorm without affine part over the last axis, as the networks have it.

    >>> normalised(torch.tensor([1.0, 3.0]))
    tensor([-1.0000,  1.0000])
    """
    if not x.is_cuda or x.dtype.itemsize < 4:
        return F.layer_norm(x, x.shape[-1:], eps=EPS)
    out: Tensor = Normalise.apply(x)[0]  # type: ignore[no-untyped-call]
    return out


class Normalise(torch.autograd.Function):
    """`normalised` in few kernels, and the scale of each row.

    CUDA's LayerNorm gives a thread block to each row, of which a width of 32 leaves most idle.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised rows, and what they were divided by, inverted."""
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        scale = (variance + EPS).rsqrt()
        return (x - mean).mul_(scale), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Keep the outputs; they determine the gradient."""
        ctx.save_for_backward(*output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        """Gradient without its mean and its part along the output."""
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True) * scale
        rest = torch.addcmul(grad.mean(-1, keepdim=True) * -scale, grad, scale)
        return torch.addcmul(rest, y, along, value=-1)


def _fused(w: Mapping[str, Tensor]) -> Tensor:
    """Queries, keys and values of all heads in one matrix ``[networks, D, 3 · heads · d]``."""
    if "W_QKV" in w:
        return w["W_QKV"]
    return torch.cat([w[f"W_{part}"].transpose(1, 2).flatten(2) for part in "QKV"], -1)


def _token_masks(
    lengths: Tensor | None, M: int, B: int, T: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The attention mask, and the weight of each token in the mean; None without padding."""
    if lengths is None:
        return None, None
    lengths = lengths.expand(M)
    real = torch.arange(T, device=like.device) < lengths[:, None]
    # A padded query attends like any other; its output is weighted by zero in the mean.
    mask = real.repeat_interleave(B, 0)[:, None, None, :].expand(-1, 1, T, -1)
    return mask, (real / lengths[:, None]).to(like.dtype)[:, None, :, None]


def _forward(weights: Mapping[str, Tensor], X: Tensor, *, positions: Tensor) -> Tensor:
    """Logits ``[*lead, classes]`` of weights ``[*lead, *axes]`` and ``X [..., T, patch]``.

    Axes of ``X`` before the tokens broadcast against ``lead``.
    """
    lead = weights["classifier.b_2"].shape[:-1]
    shape = torch.broadcast_shapes(lead, X.shape[:-2])
    sizes = (1,) * (len(shape) - len(lead)) + tuple(lead)
    # Axes with one network for each index first, then those along which only inputs vary.
    order = sorted(range(len(shape)), key=lambda axis: sizes[axis] == 1)
    networks = math.prod(lead)
    X = X.expand(*shape, *X.shape[-2:]).permute(*order, -2, -1)
    inputs = X.reshape(networks, -1, *X.shape[-2:])
    flat = {name: w.reshape(networks, *w.shape[len(lead) :]) for name, w in weights.items()}
    logits = zoo_logits(flat, inputs, positions.to(inputs))
    logits = logits.view(*(shape[axis] for axis in order), logits.shape[-1])
    return logits.permute(*(order.index(axis) for axis in range(len(shape))), -1)


def _scales(blocks: int) -> tuple[Rescaling, ...]:
    """Positive scales of ReLU neurons, undone by what reads them."""
    at = [(f"{i}.", f"blocks.{i}.") for i in range(blocks)]
    out = [
        Rescaling(
            f"{axis}scale",
            f"{axis}neuron",
            (f"{name}W_A", f"{name}b_A"),
            (f"{name}W_B",),
            positive=True,
        )
        for axis, name in at
    ]
    pair = (("classifier.W_1", "classifier.b_1"), ("classifier.W_2",))
    return (*out, Rescaling("scale", "hidden", *pair, positive=True))


def _naming(sizes: Mapping[str, int], positions: Tensor) -> Naming:
    """The key names of the authors' files; `nn.Linear` stores ``[out, in]``."""
    n, D = sizes["blocks"], sizes["d_model"]
    lines: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    constants: dict[str, Tensor] = {}
    if sizes["patch"]:
        side = round(sizes["patch"] ** 0.5)
        constants["embedding.pos_embedding"] = positions
        lines["embedding.conv1.weight"] = "embedding.W: stream0 patch"
        lines["embedding.conv1.bias"] = "embedding.b: stream0"
        shapes["embedding.conv1.weight"] = (D, 1, side, side)
    for i in range(n):
        at, here = f"encoder.{i}", f"blocks.{i}"
        for letter, name, axis in (
            ("Q", "queries", "qk"),
            ("K", "keys", "qk"),
            ("V", "values", "vo"),
        ):
            line = f"{here}.W_{letter}: ({i}.head {i}.{axis}) stream{i}"
            lines[f"{at}.attention.{name}.weight"] = line
        lines |= {
            f"{at}.attention.out_projection.weight": f"{here}.W_O: {i}.feature ({i}.head {i}.vo)",
            f"{at}.fc1.weight": f"{here}.W_A: {i}.neuron {i}.feature",
            f"{at}.fc1.bias": f"{here}.b_A: {i}.neuron",
            f"{at}.fc2.weight": f"{here}.W_B: stream{i + 1} {i}.neuron",
            f"{at}.fc2.bias": f"{here}.b_B: stream{i + 1}",
        }
    lines |= {
        "classifier.fc1.weight": f"classifier.W_1: hidden stream{n}",
        "classifier.fc1.bias": "classifier.b_1: hidden",
        "classifier.fc2.weight": "classifier.W_2: class hidden",
        "classifier.fc2.bias": "classifier.b_2: class",
    }
    return Naming(lines, shapes, constants)
