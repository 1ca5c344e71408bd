"""The figures of runs and zoos: accuracies, predicted against true, τ by model and by networks."""

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
from transformer_nfn.paper.table_text import curve_lines, finite, lay_out, mean_tau
from transformer_nfn.prediction.runs import RUN_FILE, RunRecord
from transformer_nfn.report.findings import inside
from transformer_nfn.report.held_out import MILLION, HeldOut, TestedModel, held_out
from transformer_nfn.report.number_text import (
    HEADINGS,
    counted,
    fixed,
    network_name,
    setting,
)
from transformer_nfn.report.plot import Axis, Plot, round_ticks, sheet, symbol, titled

BINS = 20
MOST_POINTS = 1000
"""More points than this hide each other."""
OPTIMIZERS = ("sgd", "sgdm", "adam", "rmsprop")
WIDTH, HEIGHT, NARROW = 560, 300, 420
_LAST_COLOR = 8


@dataclass(frozen=True)
class Row:
    """A model in `dots`: its value with an error, those of its seeds, and the words about it."""

    name: str
    color: str
    value: float
    error: float | None
    seeds: list[float]
    words: list[str]


@dataclass(frozen=True)
class Series:
    """A model in `lines`: thick and thin lines, and dots of place, value, error, size and words."""

    name: str
    color: str
    thick: Sequence[tuple[float, float]]
    thin: Sequence[Sequence[tuple[float, float]]]
    dots: Sequence[tuple[float, float, float | None, float, list[str]]]


def share_text(value: float) -> str:
    """``91.2 %``."""
    return f"{fixed(100 * value, 1)} %"


def ticked(value: float) -> str:
    """``90``, ``87.5``, of a share."""
    return f"{100 * value:g}"


def color_of(model: str) -> str:
    """Class of the colour of a model."""
    return f"m{min(model_place(model)[0], _LAST_COLOR)}"


def _spread(values: Iterable[float], least: float, part: float) -> tuple[float, float]:
    known = list(values)
    pad = max(least, part * (max(known) - min(known)))
    return min(known) - pad, max(known) + pad


def dots(title: str, about: str, rows: Sequence[Row], unit: float, rule: float | None) -> Plot:
    """A line for each model: its value, the error, and a small mark for each seed."""
    ends = [v for row in rows for v in (row.value - (row.error or 0), row.value + (row.error or 0))]
    ends += [value for row in rows for value in row.seeds] + ([] if rule is None else [rule])
    low, high = _spread(ends, 0.01, 0.08)
    x = Axis(low, high, "", round_ticks(low, high, 5), lambda v: f"{unit * v:g}")
    band, top = 34, 14
    height = top + band * len(rows) + 26
    plot = Plot(title, about, x, Axis(0, 1), NARROW, height, (top, 14, 26, 160))
    if rule is not None:
        plot.line((rule, rule), (0, 1), "always")
    for i, row in enumerate(rows):
        y = top + band * (i + 0.5)
        plot.text(row.name, 148.0, y + 4, "end", "name")
        for value in row.seeds:
            plot.draw("circle", class_=f"seed {row.color}", cx=plot.across(value), cy=y, r=2.5)
        if row.error is not None:
            x1, x2 = (plot.across(row.value + sign * row.error) for sign in (-1, 1))
            plot.draw("line", class_=f"line {row.color}", x1=x1, x2=x2, y1=y, y2=y)
        plot.draw("circle", titled(row.name, row.words), class_=f"mean {row.color}",
                  cx=plot.across(row.value), cy=y, r=5.5)  # fmt: skip
    return plot


def lines(
    title: str, about: str, series: Sequence[Series], x: str, y: str, *, places: Sequence[int] = ()
) -> Plot:
    """A line for each model; over these places, which double, or over epochs."""
    across = [dot[0] for each in series for dot in each.dots]
    points = [p for each in series for line in (each.thick, *each.thin) for p in line]
    values = [value for _, value in points]
    values += [v + s * (e or 0) for each in series for _, v, e, *_ in each.dots for s in (-1, 1)]
    low, high = _spread(values, 0.01 if places else 0.005, 0.06)
    first, last = min(across), max(across)
    shown = _apart(places) if places else [n for n in round_ticks(first, last, 5) if n % 1 == 0]
    plot = Plot(
        title, about, Axis(first, last, x, shown, "{:,.0f}".format, log=bool(places)),
        Axis(low, high, y, round_ticks(low, high, 5)), WIDTH, HEIGHT, (26, 20, 46, 50),
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


def _apart(places: Iterable[int]) -> list[int]:
    """Those whose labels do not overlap; the largest always has one."""
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
    if log:
        powers = [10.0**i for i in range(8) if 10**i <= 1.3 * top]
        y = Axis(0.7, max(10.0, 1.3 * top), "networks (log scale)", powers, "{:,.0f}".format, True)
    else:
        ticks = [tick for tick in round_ticks(0, 1.08 * top, 5) if tick % 1 == 0]
        y = Axis(0, 1.08 * top, "networks", ticks, "{:,.0f}".format)
    x = Axis(0, 1, "true accuracy (%)", round_ticks(0, 1, 5), ticked)
    about = f"{counted(len(values), 'network')}."
    plot = Plot(title, about, x, y, WIDTH, HEIGHT, (26, 14, 46, 50))
    for i, count in enumerate(counts.tolist()):
        if count:
            start, end, up = plot.across(i / BINS), plot.across((i + 1) / BINS), plot.down(count)
            words = [counted(count, "network"), share_text(count / len(values))]
            name = f"{100 * i // BINS} to {100 * (i + 1) // BINS} %"
            plot.draw("rect", titled(name, words), class_="bar m7", x=start + 0.8, y=up,
                      width=end - start - 1.6, height=HEIGHT - 46 - up)  # fmt: skip
    return plot


def taus(part: HeldOut) -> Plot | None:
    """τ of each model."""
    rows = []
    for run in part.zoo.finished:
        tau, error = mean_tau(run.record)
        if tau is None:
            continue
        words = [f"mean τ {mean_text(tau, error)}"]
        values = []
        for seed in run.record.seeds:
            if (value := finite(seed.get("tau"))) is not None:
                values.append(value)
                low, high = (finite(seed.get(f"tau_{end}")) for end in ("low", "high"))
                known = low is not None and high is not None
                bounds = f" ({mean_text(low)} to {mean_text(high)})" if known else ""
                words.append(f"seed {seed.get('seed')} {mean_text(value)}{bounds}")
        rows.append(Row(run.name, color_of(run.record.model), tau, error, values, words))
    about = f"{counted(len(rows), 'model')}, best τ first."
    return dots("Kendall’s τ of each model", about, rows, 1.0, None) if rows else None


def coverage(part: HeldOut) -> Plot | None:
    """Shares of test networks inside their interval, and the largest aim."""
    rows, levels, accuracy = [], [], part.networks.accuracy
    for model in part.models:
        shares = {each.seed: inside(each, accuracy) for each in model.seeds}
        known = {seed: found[np.isfinite(found)] for seed, found in shares.items()}
        known = {seed: found for seed, found in known.items() if len(found)}
        if not known:
            continue
        level = finite(model.run.record.summary.get("level"))
        mean = float(np.concatenate(list(known.values())).mean())
        seeds = {seed: float(found.mean()) for seed, found in known.items()}
        words = [f"in interval {share_text(mean)}"]
        words += [] if level is None else [f"aim {share_text(level)}"]
        words += [f"seed {seed} {share_text(value)}" for seed, value in seeds.items()]
        levels += [] if level is None else [level]
        color = color_of(model.run.record.model)
        rows.append(Row(model.run.name, color, mean, None, [*seeds.values()], words))
    title = "Test networks inside their interval (%)"
    about = f"{counted(len(rows), 'model')}."
    return dots(title, about, rows, 100.0, max(levels, default=None)) if rows else None


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


def _panel(part: HeldOut, model: TestedModel, low: float, high: float) -> Plot:
    networks, mean, seeds = part.networks, model.mean, [each.seed for each in model.seeds]
    kept = np.arange(len(mean.network))
    if len(kept) > MOST_POINTS:  # evenly over the networks, so that it looks like the whole
        kept = np.arange(MOST_POINTS) * (len(kept) - 1) // (MOST_POINTS - 1)
    kept = kept[np.argsort(networks.accuracy[mean.network[kept]], kind="stable")]
    whose = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    name, ticks, named = model.run.name, round_ticks(low, high, 4), "optimizer" in networks.settings
    plot = Plot(
        f"{name}: predicted against true accuracy", f"{counted(len(kept), 'network')}, {whose}.",
        Axis(low, high, "true accuracy (%)", ticks, ticked),
        Axis(low, high, "predicted (%)", ticks, ticked), 280, 300, (46, 12, 46, 36),
    )  # fmt: skip
    plot.text(name, 0.0, 14.0, kind="head")
    if (tau := mean_tau(model.run.record)[0]) is not None:
        plot.text(f"τ {mean_text(tau)}", 268.0, 37.0, "end", "tau")
    if part.always is not None and low <= part.always[0] <= high:
        plot.line((low, high), (part.always[0], part.always[0]), "always")
    plot.line((low, high), (low, high), "diagonal")
    for i in kept.tolist():
        n = int(mean.network[i])
        true, said = float(networks.accuracy[n]), float(mean.predicted[i])
        words = [f"true {share_text(true)}", f"predicted {share_text(said)}"]
        bounds = [float(mean.low[i]), float(mean.high[i])]
        if np.isfinite(bounds).all():
            words.append(f"interval {fixed(100 * bounds[0], 1)} to {share_text(bounds[1])}")
        about = {"run": networks.run[n]}
        about |= {HEADINGS[key]: networks.configuration[key][n] for key in networks.settings}
        words += [f"{k if k == 'L2' else k[0].lower() + k[1:]} {setting(value)}"
                  for k, value in about.items() if value is not None]  # fmt: skip
        kind = optimizer_kind(networks.configuration["optimizer"][n]) if named else 0
        title = titled(network_name(part.reference, networks.place[n], networks.run[n]), words)
        x, y = plot.across(true), plot.down(said)
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


def sizes(by_model: Mapping[str, Sequence[RunRecord]], title: str) -> Plot:
    """τ by number of training networks, with standard errors."""
    series = []
    for model, records in by_model.items():
        name, dots_ = model_name(model), []
        for record in records:
            (tau, error), train = mean_tau(record), record.selection["train"]
            words = [f"{train:,} training networks", f"τ {mean_text(tau, error)}"]
            dots_.append((train, float(tau or 0.0), error, 4.0, words))
        series.append(Series(name, color_of(model), [dot[:2] for dot in dots_], [], dots_))
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
        found = [(a, b, None, 2.0, [f"epoch {a}", f"{label} {mean_text(b)}"]) for a, b in means]
        kept = {str(seed.get("seed")): finite(seed.get("best_epoch")) for seed in run.record.seeds}
        for seed, values in seeds.items() if field == "val_tau" else ():
            if (epoch := kept.get(seed)) is not None and epoch in values:
                value = values[int(epoch)]
                words = [f"kept of seed {seed}", f"epoch {epoch:g}", f"{label} {mean_text(value)}"]
                found.append((int(epoch), value, None, 4.0, words))
        thin = [sorted(seed.items()) for seed in seeds.values()] if len(seeds) > 1 else []
        if means:
            series.append(Series(run.name, color_of(run.record.model), means, thin, found))
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
    views = lay_out(LEARNING_CURVE.name, records)
    return _curves(stem, {view.zoo: curve_lines(view) for view in views})


def _curves(stem: Path, by_zoo: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> list[Path]:
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
    for path, text in zip(paths, drawn, strict=False):
        write_text(path, text)
    return paths[: len(drawn)]
