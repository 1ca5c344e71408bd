"""Inspection of a network: sizes, tensors, symmetries, spectra, dead and duplicate units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.reduced import Reduced, ReducedBlock
from transformer_nfn.checkpoints.symmetries import SymmetrySize, symmetry_sizes
from transformer_nfn.checkpoints.symmetries.attention import score_gains
from transformer_nfn.checkpoints.symmetries.neurons import neuron_scales
from transformer_nfn.checkpoints.units import (
    DEAD,
    DUPLICATE,
    Redundancy,
    matrix_spectrum,
    product_spectrum,
    redundant_heads,
    redundant_neurons,
    stable_rank,
)
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import KEPT, Attention, Transformer, axes_of
from transformer_nfn.io.files import blank_figure, save_figure

PANELS = ("QK", "VO", "cross.QK", "cross.VO", "W_A", "W_G", "W_B")
VISIBLE = 3e-4
"""Singular values smaller than this, relative to the largest, are rounding errors."""


@dataclass(frozen=True)
class TensorLine:
    """Tensors of one name in all blocks.

    Attributes:
        name: canonical, ``{i}`` for the number of a block, ``{e}`` for that of an expert.
        times: number of these tensors.
        shape: of the first one.
        axes: names of the axes.
        acts: what acts on each axis; empty where nothing does.
    """

    name: str
    times: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    acts: tuple[str, ...]


@dataclass(frozen=True)
class BlockReport:
    """Spectra and redundant units of one block.

    Attributes:
        name: ``0``, ``encoder.3``.
        spectra: singular values: ``QK`` and ``VO`` per head ``[h, d]``, ``W_A``, ``W_B``, ``W_G``
            ``[n]``, of a mixture ``[experts, n]``; those of an attention to an encoder begin with
            ``cross.``.
        heads: by the prefix of their attention.
        neurons: None where a block has no MLP.
    """

    name: str
    spectra: Mapping[str, Tensor]
    heads: Mapping[str, Redundancy]
    neurons: Redundancy | None

    def as_json(self) -> dict[str, Any]:
        """As plain numbers and strings."""
        return {
            "name": self.name,
            "spectra": {
                name: {"values": values.tolist(), "stable_rank": stable_rank(values).tolist()}
                for name, values in self.spectra.items()
            },
            "heads": {part or "own": _redundancy_json(r) for part, r in self.heads.items()},
            "neurons": None if self.neurons is None else _redundancy_json(self.neurons),
        }


def _redundancy_json(units: Redundancy) -> dict[str, Any]:
    return {"dead": list(units.dead), "duplicates": [list(pair) for pair in units.duplicates]}


@dataclass(frozen=True)
class Inspection:
    """Report on one network.

    Attributes:
        where: its file.
        family: such as ``gpt2``.
        sizes: names and numbers: width, heads, neurons, vocabulary, dtype.
        tensors: one line for each name, and what acts on its axes.
        symmetries: size of every symmetry.
        ties: tensors that stand for two things.
        blocks: one by one.
    """

    where: str
    family: str
    sizes: Mapping[str, Any]
    tensors: tuple[TensorLine, ...]
    symmetries: tuple[SymmetrySize, ...]
    ties: tuple[str, ...]
    blocks: tuple[BlockReport, ...]

    @property
    def continuous(self) -> int:
        """Continuous parameters of the group."""
        return sum(row.continuous for row in self.symmetries)

    @property
    def finite(self) -> float:
        """log10 of the number of its permutations and signs."""
        return sum(row.finite for row in self.symmetries)

    def as_json(self) -> dict[str, Any]:
        """As plain numbers and strings."""
        return {
            "where": self.where,
            "family": self.family,
            "sizes": dict(self.sizes),
            "ties": list(self.ties),
            "tensors": [
                {
                    "name": line.name,
                    "times": line.times,
                    "shape": list(line.shape),
                    "axes": [
                        {"name": name, "acts": acts or None}
                        for name, acts in zip(line.axes, line.acts, strict=True)
                    ],
                }
                for line in self.tensors
            ],
            "group": {
                "continuous_parameters": self.continuous,
                "log10_permutations_and_signs": self.finite,
                "rows": [vars(row) for row in self.symmetries],
            },
            "thresholds": {"dead": DEAD, "duplicate": DUPLICATE},
            "blocks": [block.as_json() for block in self.blocks],
        }


def inspect(
    model: Model, progress: Callable[[str], None] | None = None, *, weights: bool = True
) -> Inspection:
    """Inspect an open checkpoint of a known family; NaN in any of its tensors is rejected.

    Args:
        weights: read them; without, there are no blocks in the report.
        progress: called with the name of each finished block.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("llama")) as model:
        ...     report = inspect(model)
        >>> report.family, report.continuous, [block.name for block in report.blocks]
        ('llama', 180, ['0', '1'])
    """
    blocks = []
    if weights:
        model.check_numbers()
        reduced = Reduced(model, torch.float32)
        for name in reduced.blocks:
            blocks.append(_inspect_block(reduced.block(name)))
            if progress is not None:
                progress(name)
    description = model.description
    return Inspection(
        model.where,
        description.family,
        _sizes(model),
        _family_tensors(description),
        symmetry_sizes(description),
        ("the output matrix is the token embedding",) if description.tied else (),
        tuple(blocks),
    )


def axis_actions(lines: Iterable[TensorLine]) -> dict[str, tuple[str, ...]]:
    """Actions on each axis, over all tensors that have it."""
    actions: dict[str, dict[str, None]] = {}
    for line in lines:
        for name, acts in zip(line.axes, line.acts, strict=True):
            actions.setdefault(name, {}).update({acts: None} if acts else {})
    return {name: tuple(acts) for name, acts in actions.items()}


# Blocks


def _inspect_block(block: ReducedBlock) -> BlockReport:
    spectra: dict[str, Tensor] = {}
    heads: dict[str, Redundancy] = {}
    for prefix, attention in block.attentions():
        pieces = block.query_key(prefix)
        Q, K = pieces["W_Q"].value, pieces["W_K"].value
        if attention.qk_norm:
            Q = Q * score_gains(pieces["q_norm.g"].value, pieces["k_norm.g"].value)
        V = block.reader(f"{prefix}W_V")[0].value
        O_rows = block.writer(f"{prefix}W_O").value.mT
        maps, heads[prefix] = _inspect_attention(Q, K, V, O_rows)
        spectra |= {f"{prefix}{name}": values for name, values in maps.items()}
    maps, neurons = _inspect_mlp(block)
    return BlockReport(block.name, spectra | maps, heads, neurons)


def _inspect_mlp(block: ReducedBlock) -> tuple[dict[str, Tensor], Redundancy]:
    """Spectra ``[n]``, or of all experts ``[experts, n]``, and redundant neurons of each expert;
    the neurons of all experts are counted through."""
    mlp = block.description.mlp
    spectra: dict[str, list[Tensor]] = {}
    dead: list[int] = []
    duplicates: list[tuple[int, int, float]] = []
    for e, prefix in enumerate(mlp.prefixes):
        W_A, b_A = block.reader(f"{prefix}W_A")
        read = [W_A.value.mT]
        maps = {"W_A": matrix_spectrum(W_A.value)}
        if b_A is not None:
            read.append(b_A.value.unsqueeze(-1))
        if mlp.gated:
            read = [block.reader(f"{prefix}W_G")[0].value.mT]
            maps["W_G"] = matrix_spectrum(read[0])
            unit = W_A.value / W_A.value.norm(dim=0).clamp_min(1e-30)
            read.append(unit.mT * read[0].norm(dim=1, keepdim=True))
        write = block.writer(f"{prefix}W_B").value
        maps["W_B"] = matrix_spectrum(write)
        relu = mlp.activation == "relu" and not mlp.gated
        found = redundant_neurons(torch.cat(read, 1), write, scale_free=relu)
        for name, values in maps.items():
            spectra.setdefault(name, []).append(values)
        first = e * mlp.neurons
        dead += [first + i for i in found.dead]
        duplicates += [(first + i, first + j, cosine) for i, j, cosine in found.duplicates]
    joined = {n: torch.stack(v) if mlp.experts else v[0] for n, v in spectra.items()}
    return joined, Redundancy(tuple(dead), tuple(duplicates))


def _inspect_attention(
    Q: Tensor, K: Tensor, V: Tensor, O_rows: Tensor
) -> tuple[dict[str, Tensor], Redundancy]:
    """Spectra and redundant heads of an attention, all ``[heads or groups, D, d]``."""
    QK, OV = product_spectrum(Q, K), product_spectrum(O_rows, V)
    return {"QK": QK, "VO": OV}, redundant_heads((Q, K), (O_rows, V), OV)


# Sizes, tensors and symmetries


def _sizes(model: Model) -> dict[str, Any]:
    description = model.description
    block = description.stacks[-1].blocks[0]
    attention, mlp = block.attention, block.mlp
    sizes: dict[str, Any] = {
        "weights": sum(math.prod(shape) for shape in model.names.values()),
        "tensors": len(model.names),
        "dtype": str(model.dtype).removeprefix("torch."),
        "blocks": {s.prefix.rstrip(".") or "blocks": len(s.blocks) for s in description.stacks},
        **({"repeats": repeats} if (repeats := description.stacks[-1].repeats) > 1 else {}),
        "width": description.width,
        "heads": attention.heads,
        "key/value heads": attention.groups,
        "d_k": attention.d_k,
        "d_v": attention.d_v,
        **({"experts": mlp.experts, "active experts": mlp.active} if mlp.experts else {}),
        "neurons": mlp.neurons,
        "activation": mlp.activation + (", gated" if mlp.gated else ""),
        "norm": {"layer": "LayerNorm", "rms": "RMS norm"}[description.norm] + f", {block.order}",
    }
    if attention.rotary:
        sizes["rotary"] = attention.rotary
    if description.vocab is not None:
        sizes["vocabulary"] = description.vocab
    return sizes


def _family_tensors(description: Transformer) -> tuple[TensorLine, ...]:
    """The tensors of a checkpoint, those of all blocks in one line."""
    lines: dict[str, TensorLine] = {}
    for name, shape in description.tensors.items():
        short = re.sub(r"^((?:encoder\.|decoder\.)?)\d+\.", r"\1{i}.", name)
        short = re.sub(r"\.expert\.\d+\.", ".expert.{e}.", short)
        if short in lines:
            old = lines[short]
            lines[short] = TensorLine(short, old.times + 1, old.shape, old.axes, old.acts)
            continue
        axes = () if name.startswith(KEPT) else axes_of(name, len(shape))
        acts = _actions(description, name)
        lines[short] = TensorLine(short, 1, shape, axes, tuple(acts.get(a, "") for a in axes))
    return tuple(lines.values())


def _actions(description: Transformer, name: str) -> Mapping[str, str]:
    """Actions on the axes of a tensor."""
    stack = next((s for s in description.stacks if s.prefix and name.startswith(s.prefix)), None)
    block = (stack or description.stacks[0]).blocks[0]
    attention = block.attention
    if "cross." in name and block.cross is not None:
        attention = block.cross
    scales = neuron_scales(block.mlp)
    acts = description.stream_group != "none" and description.moves(name)
    streams: str = description.stream_group if acts else ""
    if block.order == "chain":
        streams += ", each sublayer's its own"
    heads = "permuted"
    if attention.position_bias and "cross." not in name:
        heads = "permuted, all blocks alike"
    if attention.groups < attention.heads:
        heads = "permuted within its group, groups permuted"
    if attention.alibi:
        heads = ""
    return {
        "D": streams,
        "head": heads,
        "group": "" if attention.alibi else "permuted",
        "expert": "permuted",
        "d_k": _query_action(attention),
        "d_v": f"GL({attention.d_v}) per key/value head",
        "neuron": "permuted" if scales is None else f"permuted, {scales} scale",
        "hidden": "permuted, positive scale",
        "mlm": "permuted with the stream" if description.tied else "permuted",
    }


def _query_action(attention: Attention) -> str:
    if attention.qk_norm:
        return "signs and quarter turns of pairs"
    parts = []
    if attention.rotary:
        parts.append(f"{attention.rotary // 2} complex scales")
    if attention.d_k > attention.rotary:
        parts.append(f"GL({attention.d_k - attention.rotary})")
    return f"{' and '.join(parts)} per key head"


# Figure


def draw_spectra(report: Inspection, out: str | Path) -> Path:
    """Draw singular values by block and head into ``out`` (png, pdf or svg by its name)."""
    shown = [p for p in PANELS if any(p in b.spectra for b in report.blocks)]
    if not shown:
        raise SpaceError(f"'{report.where}' has no block whose spectra could be drawn")
    figure = blank_figure(0.8 + 3.0 * len(shown), 3.2, SpaceError)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, panel in zip(panels, shown, strict=True):
        _draw_panel(axes, report, panel)
    panels[0].set_ylabel("singular value")
    figure.suptitle(f"{Path(report.where).name}: {report.family}", x=0.01, ha="left")
    if len(report.blocks) > 1:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(0, len(report.blocks) - 1), cmap="viridis")
        figure.colorbar(scale, ax=list(panels), label="block", shrink=0.9)
    return save_figure(figure, Path(out), SpaceError)


def _draw_panel(axes: Any, report: Inspection, panel: str) -> None:
    from matplotlib import colormaps

    last = max(len(report.blocks) - 1, 1)
    for i, block in enumerate(report.blocks):
        if panel not in block.spectra:
            continue
        colour = colormaps["viridis"](i / last)
        for line in torch.atleast_2d(block.spectra[panel]):
            positive = line[line > VISIBLE * line.max()]
            axes.plot(range(1, len(positive) + 1), positive, color=colour, lw=0.6, alpha=0.7)
    per_head = " (a line per head)" if panel.endswith(("QK", "VO")) else ""
    axes.set_title(f"{panel}{per_head}", loc="left", fontsize=9)
    axes.set(yscale="log", xlabel="rank")
    axes.spines[["top", "right"]].set_visible(False)
