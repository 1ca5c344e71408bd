"""Frame in which two blocks are compared: gains one, biases folded; and the way back to B's gains.

What a norm's gain, its bias and LayerNorm's centring leave free is not looked for: it is taken
away from both blocks before they are compared, and set to what B has afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import heads, norms
from transformer_nfn.checkpoints.disguises.sites import Site
from transformer_nfn.functional.description import Block
from transformer_nfn.spaces.actions.solvers import nearest_scales_from_products, signs

Weights = dict[str, Tensor]
NOTHING = 1e-6
"""Gains smaller than this, relative to the largest, count as zero."""
MEMORY = norms.Reading("memory", ("cross.W_K", "cross.W_V"))
"""The norm after an encoder, which every block of the decoder reads."""


def foldable(block: Block, own: Mapping[str, Tensor]) -> list[norms.Reading]:
    """The norms of a block whose gains only its readers see."""
    found = [*norms.readings(block, own), *([MEMORY] if "memory.g" in own else [])]
    return [r for r in found if r.residual is None and f"{r.norm}.g" in own]


def fold(own: Weights, readings: list[norms.Reading]) -> None:
    """Biases of norms into those of their readers where they have any, then gains to one."""
    for reading in readings:
        if reading.biased(own):
            own |= norms.absorb_bias(own, reading)
        gain = own[f"{reading.norm}.g"]
        own |= norms.replace_gain(own, reading, torch.ones_like(gain))


def divides(reading: norms.Reading, own: Mapping[str, Tensor]) -> bool:
    """Whether a norm's bias, if nothing takes it up, can be scaled with its gain."""
    if f"{reading.norm}.b" not in own:
        return True
    if reading.biased(own) and reading.residual is None:
        return True
    gain = own[f"{reading.norm}.g"].double().abs()
    return bool(gain.min() > NOTHING * gain.max())


def into_frame(site: Site, own: Weights) -> None:
    """Brings a block into the frame of comparison."""
    readings = foldable(site.block, own)
    fold(own, readings)
    for norm in ("after_1", "after_2"):
        if f"{norm}.g" in own:
            own |= norms.sign_against_gain(own, norm, signs(own[f"{norm}.g"]))
    if "q_norm.g" in own:
        own |= heads.sign_against_gains(own, signs(own["q_norm.g"]), signs(own["k_norm.g"]))
    nothing = {name: torch.zeros_like(w) for name, w in own.items()}
    _post_norms(site, own, nothing)
    if site.about.norm == "layer":
        for reading in readings:
            centre_readers(own, nothing, reading)
    _centre_writers(site, own, nothing)
    _shift_keys(site, own, nothing)
    if "b_V" in own and "b_O" in own:
        own |= heads.move_value_bias(own, -own["b_V"])
    if "bias_table" in own:
        own |= heads.shift_position_bias(own, -own["bias_table"].mean(0))
    if site.block.order == "parallel" and "b_O" in own and "b_B" in own:
        own |= norms.move_between_branches(own, own["b_B"])


def out_of_frame(site: Site, own: Weights, target: Mapping[str, Tensor]) -> None:
    """Brings a block to the gains, biases and means of B's block as its file has it."""
    if "q_norm.g" in own:
        own |= heads.sign_against_gains(own, signs(target["q_norm.g"]), signs(target["k_norm.g"]))
    for norm in ("after_1", "after_2"):
        if f"{norm}.g" in own:
            own |= norms.sign_against_gain(own, norm, signs(target[f"{norm}.g"]))
    for reading in foldable(site.block, own):
        shared = reading.norm == "memory"  # all blocks of a decoder read that one
        given = target["memory.g"] if shared else None
        unfold(own, target, reading, centred=site.about.norm == "layer", gain=given)
        if site.about.norm == "layer":
            centre_readers(own, target, reading)
    _post_norms(site, own, target)
    _shift_keys(site, own, target)
    if "b_V" in own and "b_O" in own:
        own |= heads.move_value_bias(own, target["b_V"] - own["b_V"])
    if "bias_table" in own:
        own |= heads.shift_position_bias(own, (target["bias_table"] - own["bias_table"]).mean(0))
    if site.block.order == "parallel" and "b_O" in own and "b_B" in own:
        apart = (target["b_O"] - own["b_O"]) - (target["b_B"] - own["b_B"])
        own |= norms.move_between_branches(own, apart / 2)
    _centre_writers(site, own, target)


def unfold(
    own: Weights,
    target: Mapping[str, Tensor],
    reading: norms.Reading,
    *,
    centred: bool,
    gain: Tensor | None = None,
) -> None:
    """A norm with unit gains gets B's, and B's bias where readers take that up.

    Where a gain of B's is so small that readers would grow to make up for it, a larger one is
    nearer to B as a whole, and is taken.
    """
    if gain is None:
        gain = best_gain(target[f"{reading.norm}.g"], gain_sums(own, target, reading, centred))
    own |= norms.replace_gain(own, reading, safe(gain))
    if reading.biased(own):
        name = f"{reading.norm}.b"
        own |= norms.shift_bias(own, reading, target[name] - own[name])


def gain_sums(
    own: Mapping[str, Tensor], target: Mapping[str, Tensor], reading: norms.Reading, centred: bool
) -> Tensor:
    """What the readers say about a gain: squares of A's rows, and their products with B's."""
    gain = target[f"{reading.norm}.g"]
    total = torch.zeros(2, len(gain), dtype=torch.float64)
    for name in reading.present(own):
        x, y = own[name].double(), target[name].double()
        if centred and _centred(reading, name, own):
            seen = y * gain.unsqueeze(-1)
            y = y - seen.mean(-2, keepdim=True) / safe(gain).unsqueeze(-1)
        both = [(x * z).movedim(-2, 0).flatten(1).sum(1) for z in (x, y)]
        total += torch.stack(both)
    return total


def best_gain(gain: Tensor, sums: Tensor) -> Tensor:
    """The gain that brings norm and readers nearest to B's."""
    gain = gain.double()
    ones = torch.ones_like(gain)
    other = nearest_scales_from_products(ones, sums[0], gain, sums[1], positive=False)

    def away(z: Tensor) -> Tensor:
        return z.square() - 2 * z * gain + sums[0] / z.square() - 2 * sums[1] / z

    same = safe(gain)
    return torch.where(away(same) <= away(other) + 1e-9 * sums[0], same, other)


def safe(gain: Tensor) -> Tensor:
    """Gains that can be divided by: those near zero are moved away from it."""
    least = NOTHING * gain.abs().max().clamp_min(1e-30)
    return torch.where(gain.abs() < least, torch.where(gain < 0, -least, least), gain)


def centre_readers(own: Weights, target: Mapping[str, Tensor], reading: norms.Reading) -> None:
    """``W + γ⁻¹ vᵀ``, which LayerNorm's centring hides, with the v that is nearest to B."""
    inverse = 1 / own[f"{reading.norm}.g"]
    shifts = {}
    for name in reading.present(own):
        if _centred(reading, name, own):
            away = target[name] - own[name]
            shifts[name] = torch.einsum("d,...dn->...n", inverse, away) / inverse.square().sum()
    own |= norms.shift_readers(own, reading, shifts)


def _centred(reading: norms.Reading, reader: str, own: Mapping[str, Tensor]) -> bool:
    """Whether centring hides part of a reader: its bias takes up what the norm's bias adds."""
    return f"{reading.norm}.b" not in own or norms.bias_of(reader) in own


def _post_norms(site: Site, own: Weights, target: Mapping[str, Tensor]) -> None:
    """Norms in the residual: their biases are free, and what their centring hides."""
    for reading in norms.readings(site.block, own):
        if reading.residual is not None and reading.biased(own):
            name = f"{reading.norm}.b"
            own |= norms.shift_bias(own, reading, target[name] - own[name])
            if divides(reading, own) and site.about.norm == "layer":
                centre_readers(own, target, reading)


def _centre_writers(site: Site, own: Weights, target: Mapping[str, Tensor]) -> None:
    if site.about.hides_mean:
        names = [n for n in ("W_O", "b_O", "W_B", "b_B") if n in own]
        own |= norms.shift_writers(own, {n: (target[n] - own[n]).mean(-1) for n in names})


def _shift_keys(site: Site, own: Weights, target: Mapping[str, Tensor]) -> None:
    about = site.block.attention
    if "b_K" in own and not about.qk_norm and about.softcap is None:
        shift = target["b_K"] - own["b_K"]
        shift[..., : about.rotary] = 0
        own |= heads.shift_key_bias(own, shift)
