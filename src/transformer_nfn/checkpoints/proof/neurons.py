"""Permutation and scales that take one MLP's neurons to another's, with every tensor checked."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof import solve
from transformer_nfn.checkpoints.proof.checks import has_double
from transformer_nfn.checkpoints.proof.match import BlockMatch
from transformer_nfn.checkpoints.reduced import Piece
from transformer_nfn.checkpoints.sketches import BlockSketch
from transformer_nfn.spaces.actions.permutation import match_rows


def match_neurons(
    match: BlockMatch, sketches: tuple[BlockSketch, BlockSketch]
) -> tuple[Tensor, Tensor | None]:
    about = match.a.about.mlp
    scaled = about.gated or about.activation == "relu"
    features = [_neuron_features(s, gated=about.gated, scaled=scaled) for s in sketches]
    order = match_rows(features[1], features[0]).index
    (W_A, b_A), (V_A, c_A) = (block.reader("W_A") for block in (match.a, match.b))
    mine = match.stream.columns(W_A.value)[:, order]
    W_B, V_B = (block.writer("W_B") for block in (match.a, match.b))
    out = match.stream(W_B.value[order])
    width = len(mine)
    scales: Tensor | None = None
    s = torch.ones(len(order), dtype=mine.dtype)
    if scaled:
        weights = (1 / V_A.error.clamp_min(1e-300), 1 / W_B.error[order].clamp_min(1e-300))
        scales = s = solve.solve_scales(
            (mine.mT, V_A.value.mT), (out, V_B.value), weights, positive=not about.gated
        )
        _check_scales(match, (mine, V_A), (out, V_B), (W_A.error[order], W_B.error[order]), s)
    size = V_A.value.square().sum(0)
    error = s.square() * W_A.error[order] + V_A.error
    # What a neuron reads matters if it writes, and what it writes if it reads.
    alone = ~has_double(sketches[1].neurons.read)
    used = torch.where(alone & (V_B.value.square().sum(1) > V_B.error), torch.inf, 0.0)
    match.add("W_A", (mine * s - V_A.value).square().sum(0), error, size, width, used)
    away = (out - s.unsqueeze(-1) * V_B.value).square().sum(1)
    error = W_B.error[order] + s.square() * V_B.error
    read = size if c_A is None else size + c_A.value.square()
    used = torch.where(alone & (read > V_A.error), torch.inf, 0.0)
    match.add("W_B", away, error, out.square().sum(1), width, used)
    _neuron_bias(match, "b_A", b_A, c_A, order, s)
    if about.gated:
        (W_G, b_G), (V_G, c_G) = (block.reader("W_G") for block in (match.a, match.b))
        gate = match.stream.columns(W_G.value)[:, order]
        error = W_G.error[order] + V_G.error
        away = (gate - V_G.value).square().sum(0)
        match.add("W_G", away, error, V_G.value.square().sum(0), width)
        _neuron_bias(match, "b_G", b_G, c_G, order, torch.ones_like(s))
    return order, scales


def _check_scales(
    match: BlockMatch,
    read: tuple[Tensor, Piece],
    write: tuple[Tensor, Piece],
    errors: tuple[Tensor, Tensor],
    s: Tensor,
) -> None:
    """Checks that the scale ``W_A`` asks for is the one ``W_B`` asks for, neuron by neuron."""
    (u, V_A), (w, V_B) = read, write
    size_u = u.square().sum(0).clamp_min(1e-300)
    size_w = V_B.value.square().sum(1).clamp_min(1e-300)
    away = (u * V_A.value).sum(0) / size_u - (w * V_B.value).sum(1) / size_w
    # Rounding moves large entries most, and a projection onto the neuron weighs them most again.
    focus_u = u.pow(4).sum(0) / size_u.square()
    focus_w = V_B.value.pow(4).sum(1) / size_w.square()
    error = (s.square() * errors[0] + V_A.error) * focus_u / size_u
    error += (errors[1] + s.square() * V_B.error) * focus_w / size_w
    match.add("W_A·W_B", away.square(), error, s.square(), 1)


def _neuron_bias(
    match: BlockMatch, name: str, a: Piece | None, b: Piece | None, order: Tensor, s: Tensor
) -> None:
    if a is None and b is None:
        return
    zero = torch.zeros_like(s)
    x, e = (zero, zero) if a is None else (s * a.value[order], s.square() * a.error[order])
    y, f = (zero, zero) if b is None else (b.value, b.error)
    match.add(name, (x - y).square(), e + f, torch.maximum(x.square(), y.square()), 1)


def _neuron_features(sketch: BlockSketch, *, gated: bool, scaled: bool) -> Tensor:
    """What tells neurons apart whatever their scale: ``[f, …]``."""
    n = sketch.neurons
    if gated:
        return n.read
    if scaled:
        pair = [x / x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (n.read, n.write)]
        return torch.cat(pair, 1)
    sizes = [x.square().mean().sqrt().clamp_min(1e-30) for x in (n.read, n.write)]
    return torch.cat([n.read / sizes[0], n.write / sizes[1]], 1)
