"""The paper's figures from runs and zoos: accuracy histogram, predicted against true, τ by size."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformer_nfn.errors import needs_extra
from transformer_nfn.io.files import blank_figure, save_figure
from transformer_nfn.models.predictor import model_name, model_place
from transformer_nfn.paper.gather import gather
from transformer_nfn.paper.numbers import LEARNING_CURVE
from transformer_nfn.paper.table_text import curve_lines, lay_out, mean_tau
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
# The report's colours in light: models by their place, then optimisers.
_MODELS = ("#c23b22", "#8058a5", "#a8740a", "#2f7d4f", "#6b9a1f", "#7a7f87", "#0b7f95", "#2f55b0",
           "#444a52")  # fmt: skip
_OPTIMIZERS = {
    "sgd": ("#2f6fc0", "o"),
    "sgdm": ("#0c8f8b", "s"),
    "adam": ("#b9770e", "^"),
    "rmsprop": ("#c23b56", "D"),
}
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e3dc",
    "axes.edgecolor": "#b5b0a5",
    "legend.frameon": False,
    # The same runs give the same file.
    "svg.hashsalt": "transformer-nfn",
}


class Sheet(NamedTuple):
    """A figure to be drawn: its size in inches, and what draws on it."""

    width: float
    height: float
    paint: Callable[[Figure], None]


def check_matplotlib() -> None:
    """Reject figures without matplotlib: checked before hours of training, not after."""
    with needs_extra(RunError, "matplotlib", "plot", "a figure"):
        import matplotlib.figure  # noqa: F401


def write_figures(zoo: Path, out: Path) -> list[Path]:
    """Draw all figures into ``OUT/figures``: of the zoo, and of the runs below ``out``."""
    folder = out / "figures"
    runs = any(out.rglob(RUN_FILE))
    if runs:
        gather([out])  # runs that cannot be read are refused before anything is written
    written = accuracy_histogram(zoo, folder / "accuracies")
    if runs:
        written += prediction_scatter([out], folder / "predictions")
        written += tau_by_size([out], folder / "sizes")
    return written


def accuracy_histogram(zoo: Path, stem: Path) -> list[Path]:
    """Test accuracies of every checkpoint of a zoo, counts in log scale as in the paper.

    Args:
        zoo: folder of the zoo.
        stem: path of the figure without its suffix.

    Returns:
        The files written, a PNG and an SVG.
    """
    from transformer_nfn.zoo.store import Zoo
    from transformer_nfn.zoo.summary import paint_accuracies

    opened = Zoo.open(zoo)
    paint = partial(paint_accuracies, zoo=opened, color=_MODELS[7])
    return _save(stem, [Sheet(5.2, 3.3, paint)])


def prediction_scatter(folders: list[Path], stem: Path) -> list[Path]:
    """Predicted against true accuracy on the test part of one seed, all models on one sheet.

    One sheet for each zoo of the runs below ``folders``.
    """
    sheets = []
    for zoo in gather(folders).zoos:
        runs = [run for run in zoo.finished if len(run.part("test")["row"])]
        if not runs:
            continue
        across = min(4, len(runs))
        down = -(-len(runs) // across)
        paint = partial(_paint_panels, runs=runs, across=across, down=down, label=zoo.label)
        sheets.append(Sheet(2.5 * across + 0.5, 2.4 * down + 1.1, paint))
    return _save(stem, sheets)


def _paint_panels(figure: Figure, runs: list[Any], across: int, down: int, label: str) -> None:
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for place, run in zip(grid.flat, runs, strict=False):
        part = run.part("test")
        first = part["seed"] == part["seed"].min()
        _panel(place, {key: values[first] for key, values in part.items()})
        scores = [s for s in run.record.seeds if s.get("seed") == part["seed"].min()]
        tau = f"   τ = {scores[0]['tau']:.3f}" if scores else ""
        place.set_title(f"{run.name}{tau}", loc="left", fontsize=9)
    for place in list(grid.flat)[len(runs) :]:
        place.remove()
    figure.supxlabel("true accuracy (%)", fontsize=9)
    figure.supylabel("predicted accuracy (%)", fontsize=9)
    handles, names = grid.flat[0].get_legend_handles_labels()
    # The zoo is the legend's title, so that neither covers the other on a narrow sheet.
    figure.legend(handles, names, title=textwrap.fill(label, 40 * across),
                  loc="outside upper left", alignment="left", title_fontsize=10,
                  ncols=min(len(names), 4 if across > 1 else 2) or 1)  # fmt: skip


def tau_by_size(folders: list[Path], stem: Path) -> list[Path]:
    """τ against the number of training networks, where there are runs of several sizes."""
    return _save_lines(stem, {zoo.label: zoo.by_size() for zoo in gather(folders).zoos})


def learning_curve(records: list[RunRecord], stem: Path) -> list[Path]:
    """τ against the number of training networks, from the cells of a learning curve."""
    views = lay_out(LEARNING_CURVE.name, records)
    return _save_lines(stem, {view.zoo: curve_lines(view) for view in views})


def _save_lines(stem: Path, by_zoo: Mapping[str, Mapping[str, list[RunRecord]]]) -> list[Path]:
    return _save(stem, [
        Sheet(6.4, 3.6, partial(_paint_lines, lines=lines, title=zoo))
        for zoo, lines in by_zoo.items()
        if lines
    ])  # fmt: skip


def _paint_lines(figure: Figure, lines: Mapping[str, list[RunRecord]], title: str) -> None:
    """τ with its standard error for each model, over numbers of networks that double."""
    axes = figure.subplots()
    for model, records in lines.items():
        axes.errorbar(
            [record.selection["train"] for record in records],
            [record.summary["tau"] for record in records],
            [mean_tau(record)[1] or 0 for record in records],
            color=_MODELS[min(model_place(model)[0], len(_MODELS) - 1)],
            marker="o",
            markersize=4,
            capsize=2,
            label=model_name(model),
        )
    axes.set_xscale("log", base=2)
    ticks = _apart({record.selection["train"] for line in lines.values() for record in line})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.set(xlabel="training networks (log scale)", ylabel="Kendall’s τ")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside right center")


def _apart(sizes: set[int]) -> list[int]:
    """The sizes whose labels do not overlap; the largest always has one."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or kept[-1] > 1.25 * size:
            kept.append(size)
    return kept[::-1]


def _panel(axes: Axes, part: dict[str, Any]) -> None:
    """One model: one mark per network, shape and colour by optimiser."""
    axes.plot((0, 100), (0, 100), color="#9a9a9a", linewidth=0.8, linestyle=(0, (4, 4)))
    names = part["optimizer"].astype(str)
    for name in [*_OPTIMIZERS, *sorted(set(names) - set(_OPTIMIZERS))]:
        chosen = names == name
        color, marker = _OPTIMIZERS.get(name, ("#6b6f76", "x"))
        if chosen.any():
            axes.scatter(100 * part["accuracy"][chosen], 100 * part["predicted"][chosen], s=11,
                         color=color, marker=marker, alpha=0.6, linewidths=0.3,
                         label=name)  # fmt: skip
    axes.set_aspect("equal")
    axes.set(xlim=(0, 100), ylim=(0, 100), xticks=range(0, 101, 25), yticks=range(0, 101, 25))


def _save(stem: Path, sheets: Sequence[Sheet]) -> list[Path]:
    """Draw each sheet once and write every format atomically; numbered if there are several."""
    check_matplotlib()
    import matplotlib

    written = []
    for i, sheet in enumerate(sheets, 1):
        name = stem.name if len(sheets) == 1 else f"{stem.name}-{i}"
        with matplotlib.rc_context(_STYLE):
            figure = blank_figure(sheet.width, sheet.height, RunError)
            sheet.paint(figure)
            for kind in FORMATS:
                about = {"Date": None} if kind == "svg" else None
                target = stem.with_name(f"{name}.{kind}")
                written.append(save_figure(figure, target, RunError, about))
    return written
