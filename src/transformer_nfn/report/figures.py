"""Figures of runs and zoos: accuracies, predicted against true, τ by model and by networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.io.files import write_text
from transformer_nfn.models.predictor import model_name, model_place
from transformer_nfn.paper.gather import Run, gather
from transformer_nfn.paper.numbers import LEARNING_CURVE, mean_text
from transformer_nfn.paper.rows import OurCell, finite, result_rows
from transformer_nfn.paper.table_text import curve_lines, lay_out
from transformer_nfn.prediction.runs import RUN_FILE, RunRecord
from transformer_nfn.report.held_out import MILLION, OPTIMIZERS, HeldOut, Tested, held_out
from transformer_nfn.report.number_text import (
    HEADINGS,
    counted,
    fixed,
    network_name,
    percent,
    setting,
)
from transformer_nfn.report.plot import Plot, PlotAxis, round_ticks, sheet, symbol, titled

BINS = 20
MOST_POINTS = 1000
"""More points than this hide each other."""
WIDTH, HEIGHT = 560, 300


@dataclass(frozen=True)
class Series:
    """A model in `lines`: thick and thin lines, and dots of place, value, error, size and words."""

    name: str
    color: str
    thick: Sequence[tuple[float, float]]
    thin: Sequence[Sequence[tuple[float, float]]]
    dots: Sequence[tuple[float, float, float | None, float, list[str]]]


def percent_label(value: float) -> str:
    """Tick label of a share in percent: ``90``, ``87.5``."""
    return f"{100 * value:g}"


def color_of(model: str) -> str:
    """Class of the colour of a model."""
    return f"m{min(model_place(model)[0], 8)}"


def _padded(values: Iterable[float], least: float, part: float) -> tuple[float, float]:
    known = list(values)
    pad = max(least, part * (max(known) - min(known)))
    return min(known) - pad, max(known) + pad


def lines(
    title: str, about: str, series: Sequence[Series], x: str, y: str, *, places: Sequence[int] = ()
) -> Plot:
    """A line for each model; over these places, which double, or over epochs."""
    across = [dot[0] for each in series for dot in each.dots]
    points = [p for each in series for line in (each.thick, *each.thin) for p in line]
    values = [value for _, value in points]
    values += [v + s * (e or 0) for each in series for _, v, e, *_ in each.dots for s in (-1, 1)]
    low, high = _padded(values, 0.01 if places else 0.005, 0.06)
    first, last = min(across), max(across)
    shown = _spaced(places) if places else [n for n in round_ticks(first, last, 5) if n % 1 == 0]
    plot = Plot(
        title, about, PlotAxis(first, last, x, shown, "{:,.0f}".format, log=bool(places)),
        PlotAxis(low, high, y, round_ticks(low, high, 5)), WIDTH, HEIGHT, (26, 20, 46, 50),
    )  # fmt: skip
    for each in series:
        for line, kind in (*((thin, "line thin") for thin in each.thin), (each.thick, "line")):
            text = " ".join(f"{plot.across(a):.1f},{plot.down(b):.1f}" for a, b in line)
            plot.draw("polyline", class_=f"{kind} {each.color}", points=text)
        for a, b, error, size, words in each.dots:
            if error:
                plot.line((a, a), (b - error, b + error), f"error {each.color}")
            plot.draw("circle", titled(each.name, words), class_=f"dot {each.color}",
                      cx=plot.across(a), cy=plot.down(b), r=size)  # fmt: skip
    plot.key([(each.color, each.name) for each in series])
    return plot


def _spaced(places: Iterable[int]) -> list[int]:
    """The values whose labels do not overlap, always with the largest."""
    kept: list[int] = []
    for place in sorted(set(places), reverse=True):
        if not kept or kept[-1] > 1.25 * place:
            kept.append(place)
    return kept[::-1]


def histogram(accuracy: np.ndarray, title: str, *, log: bool = False) -> Plot:
    """Networks in each of twenty bands of accuracy; a bound is in the band above it."""
    values = np.rint(accuracy[np.isfinite(accuracy)] * MILLION).astype(np.int64)
    counts = np.bincount(np.clip(values * BINS // MILLION, 0, BINS - 1), minlength=BINS)
    top = float(counts.max(initial=1))
    ends = (0.7, max(10.0, 1.3 * top)) if log else (0.0, 1.08 * top)
    places = [10.0**i for i in range(8)] if log else round_ticks(*ends, 5)
    ticks = [tick for tick in places if tick % 1 == 0 and tick <= ends[1]]
    x = PlotAxis(0, 1, "true accuracy (%)", round_ticks(0, 1, 5), percent_label)
    y = PlotAxis(*ends, f"networks{' (log scale)' * log}", ticks, "{:,.0f}".format, log)
    about = f"{counted(len(values), 'network')}."
    plot = Plot(title, about, x, y, WIDTH, HEIGHT, (26, 14, 46, 50))
    for i, count in enumerate(counts.tolist()):
        if count:
            start, end, up = plot.across(i / BINS), plot.across((i + 1) / BINS), plot.down(count)
            words = [counted(count, "network"), percent(count / len(values))]
            name = f"{100 * i // BINS} to {100 * (i + 1) // BINS} %"
            plot.draw("rect", titled(name, words), class_="bar m7", x=start + 0.8, y=up,
                      width=end - start - 1.6, height=HEIGHT - 46 - up)  # fmt: skip
    return plot


def taus(part: HeldOut) -> Plot | None:
    """A line for each model: its τ, the error, and a small mark for each seed."""
    runs = [run for run in part.zoo.finished if run.cell.value is not None]
    if not runs:
        return None
    values = [finite(seed.get("tau")) for run in runs for seed in run.record.seeds]
    means = [(run.cell.value or 0.0, run.cell.error or 0.0) for run in runs]
    ends = [end for tau, error in means for end in (tau - error, tau + error)]
    low, high = _padded([*ends, *(value for value in values if value is not None)], 0.01, 0.08)
    band, top = 34, 14
    about, height = f"{counted(len(runs), 'model')}, best τ first.", top + band * len(runs) + 26
    axes = PlotAxis(low, high, "", round_ticks(low, high, 5)), PlotAxis(0, 1)
    plot = Plot("Kendall’s τ of each model", about, *axes, 420, height, (top, 14, 26, 160))
    for i, (run, (tau, error)) in enumerate(zip(runs, means, strict=True)):
        y, color = top + band * (i + 0.5), color_of(run.record.model)
        words = [f"mean τ {run.cell.text}"]
        plot.text(run.name, 148.0, y + 4, "end", "name")
        for seed in run.record.seeds:
            value, *bounds = (finite(seed.get(key)) for key in ("tau", "tau_low", "tau_high"))
            if value is not None:
                plot.draw("circle", class_=f"seed {color}", cx=plot.across(value), cy=y, r=2.5)
                known = "" if None in bounds else f" ({' to '.join(map(mean_text, bounds))})"
                words.append(f"seed {seed.get('seed')} {mean_text(value)}{known}")
        x1, x2 = plot.across(tau - error), plot.across(tau + error)
        plot.draw("line", class_=f"line {color}", x1=x1, x2=x2, y1=y, y2=y)
        plot.draw("circle", titled(run.name, words), class_=f"mean {color}",
                  cx=plot.across(tau), cy=y, r=5.5)  # fmt: skip
    return plot


def scatter(part: HeldOut) -> list[Plot]:
    """Predicted against true accuracy: a panel for each model, means over its seeds."""
    accuracy = part.networks.accuracy
    means = [model.mean for model in part.models]
    if not means:
        return []
    every = np.concatenate([[accuracy[each.network], each.predicted] for each in means], axis=1)
    low, high = float(every.min()), float(every.max())
    step = 10 if high - low > 0.4 else 20
    ends = np.floor(low * step) / step, np.ceil(high * step) / step
    return [_panel(part, model, *map(float, ends)) for model in part.models]


def _panel(part: HeldOut, model: Tested, low: float, high: float) -> Plot:
    networks, mean, seeds = part.networks, model.mean, model.seeds
    kept = np.arange(len(mean.network))
    if len(kept) > MOST_POINTS:  # evenly over the networks, so that it looks like the whole
        kept = np.arange(MOST_POINTS) * (len(kept) - 1) // (MOST_POINTS - 1)
    kept = kept[np.argsort(networks.accuracy[mean.network[kept]], kind="stable")]
    whose = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    name, ticks, named = model.run.name, round_ticks(low, high, 4), "optimizer" in networks.settings
    plot = Plot(
        f"{name}: predicted against true accuracy", f"{counted(len(kept), 'network')}, {whose}.",
        PlotAxis(low, high, "true accuracy (%)", ticks, percent_label),
        PlotAxis(low, high, "predicted (%)", ticks, percent_label), 280, 300, (46, 12, 46, 36),
    )  # fmt: skip
    plot.text(name, 0.0, 14.0, kind="head")
    if (tau := model.run.cell.value) is not None:
        plot.text(f"τ {mean_text(tau)}", 268.0, 37.0, "end", "tau")
    if part.always is not None and low <= part.always[0] <= high:
        plot.line((low, high), (part.always[0], part.always[0]), "always")
    plot.line((low, high), (low, high), "diagonal")
    for i in kept.tolist():
        n = int(mean.network[i])
        true, predicted = float(networks.accuracy[n]), float(mean.predicted[i])
        words = [f"true {percent(true)}", f"predicted {percent(predicted)}"]
        bounds = [float(mean.low[i]), float(mean.high[i])]
        if np.isfinite(bounds).all():
            words.append(f"interval {fixed(100 * bounds[0], 1)} to {percent(bounds[1])}")
        recipe = {"run": networks.run[n]}
        recipe |= {HEADINGS[key]: networks.configuration[key][n] for key in networks.settings}
        words += [f"{k if k == 'L2' else k[0].lower() + k[1:]} {setting(value)}"
                  for k, value in recipe.items() if value is not None]  # fmt: skip
        kind = optimizer_kind(networks.configuration["optimizer"][n]) if named else 0
        title = titled(network_name(part.reference, networks.place[n], networks.run[n]), words)
        x, y = plot.across(true), plot.down(predicted)
        plot.add(symbol(kind, x, y, 3.2, title, class_=f"point o{kind}"))
    return plot


def optimizer_kind(name: Any) -> int:
    """Number of the shape and colour of an optimiser: four have their own."""
    known = str(name).lower()
    return OPTIMIZERS.index(known) if known in OPTIMIZERS else 4


def optimizers(part: HeldOut) -> list[tuple[str, str]]:
    """Class and name of each optimiser of the test networks; empty where none is known."""
    column = part.networks.configuration["optimizer"]
    names = {column[n] for n in np.flatnonzero(part.is_test).tolist()} - {None}
    ordered = sorted(names, key=lambda name: (optimizer_kind(name), str(name)))
    return [(f"o{optimizer_kind(name)}", str(name)) for name in ordered]


def sizes(by_model: Mapping[str, Sequence[OurCell]], title: str) -> Plot:
    """τ by number of training networks, with standard errors."""
    series = []
    for model, cells in by_model.items():
        name, points = model_name(model), []
        for cell in cells:
            words = [f"{cell.train:,} training networks", f"τ {cell.text}"]
            at = float(cell.train or 0), float(cell.value or 0.0)
            points.append((*at, cell.error, 4.0, words))
        series.append(Series(name, color_of(model), [point[:2] for point in points], [], points))
    places = sorted({int(dot[0]) for each in series for dot in each.dots})
    about = f"{counted(len(series), 'model')}, {counted(len(places), 'size')}."
    x = "training networks (log scale)"
    return lines(title, about, series, x, "Kendall’s τ", places=places)


def training(part: HeldOut, field: str, title: str, label: str) -> Plot | None:
    """Loss or validation τ by epoch: of each seed, their mean, and the epochs that were kept."""
    series = []
    for run in part.zoo.finished:
        seeds = _epochs(run, field)
        means = [
            (epoch, float(np.mean([seed[epoch] for seed in seeds.values() if epoch in seed])))
            for epoch in sorted({epoch for seed in seeds.values() for epoch in seed})
        ]
        dots = [(a, b, None, 2.0, [f"epoch {a}", f"{label} {mean_text(b)}"]) for a, b in means]
        kept = {str(seed.get("seed")): finite(seed.get("best_epoch")) for seed in run.record.seeds}
        for seed, values in seeds.items() if field == "val_tau" else ():
            if (epoch := kept.get(seed)) is not None and epoch in values:
                value = values[int(epoch)]
                words = [f"kept of seed {seed}", f"epoch {epoch:g}", f"{label} {mean_text(value)}"]
                dots.append((int(epoch), value, None, 4.0, words))
        thin = [sorted(seed.items()) for seed in seeds.values()] if len(seeds) > 1 else []
        if means:
            series.append(Series(run.name, color_of(run.record.model), means, thin, dots))
    about = f"{counted(len(series), 'model')}."
    return lines(title, about, series, "epoch", label) if series else None


def _epochs(run: Run, field: str) -> dict[str, dict[int, float]]:
    """A field of the log by seed and epoch; an epoch that is there twice has the later line's."""
    seeds: dict[str, dict[int, float]] = {}
    for entry in run.log:
        seed = seeds.setdefault(str(entry["seed"]), {})
        seed.pop(entry["epoch"], None)
        if (value := finite(entry[field])) is not None:
            seed[entry["epoch"]] = value
    return seeds


def write_figures(zoo: Path, out: Path) -> list[Path]:
    """Draw all figures into ``OUT/figures``: of the zoo, and of the runs below ``out``."""
    folder = out / "figures"
    parts = []
    if any(out.rglob(RUN_FILE)):  # runs that cannot be read are refused before anything is written
        parts = [held_out(i, each) for i, each in enumerate(gather([out]).zoos)]
    written = _written(folder / "accuracies", [_accuracies(zoo)])
    panels = [(scatter(part), part) for part in parts if part.models]
    written += _written(folder / "predictions", [
        sheet(plots, min(4, len(plots)), part.zoo.label, optimizers(part)) for plots, part in panels
    ])  # fmt: skip
    curves = {part.zoo.label: part.zoo.by_size() for part in parts}
    return written + _curves(folder / "sizes", curves)


def learning_curve(records: list[RunRecord], stem: Path) -> list[Path]:
    """τ against the number of training networks, from the cells of a learning curve."""
    views = lay_out(LEARNING_CURVE.name, result_rows(records))
    return _curves(stem, {view.zoo: curve_lines(view) for view in views})


def _curves(stem: Path, by_zoo: Mapping[str, Mapping[str, Sequence[OurCell]]]) -> list[Path]:
    return _written(stem, [sheet([sizes(by, zoo)], 1, zoo) for zoo, by in by_zoo.items() if by])


def _accuracies(zoo: Path) -> str:
    """Test accuracies of every checkpoint, counts in log scale as in the paper."""
    from transformer_nfn.zoo.store import Zoo
    from transformer_nfn.zoo.summary import zoo_title

    opened = Zoo.open(zoo)
    title = zoo_title(opened)
    accuracy = opened.table["test_accuracy"].astype(float)
    return sheet([histogram(accuracy, title, log=True)], 1, title)


def _written(stem: Path, drawn: Sequence[str]) -> list[Path]:
    """Write each file atomically; numbered if there are several."""
    numbers = [""] if len(drawn) == 1 else [f"-{i}" for i in range(1, len(drawn) + 1)]
    paths = [stem.with_name(f"{stem.name}{number}.svg") for number in numbers]
    for path, text in zip(paths, drawn, strict=True):
        write_text(path, text)
    return paths
