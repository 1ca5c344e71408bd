"""The tables of the report as HTML, and the sections on intervals and failures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from html import escape

import numpy as np

from transformer_nfn.paper.gather import Run
from transformer_nfn.paper.numbers import examples_text
from transformer_nfn.paper.rows import OurCell, finite
from transformer_nfn.paper.table_text import TableView, best_keys
from transformer_nfn.prediction.metrics import r_squared, worth_in_examples
from transformer_nfn.prediction.runs import IDENTITY
from transformer_nfn.report.held_out import ALWAYS_THE_MEAN, HeldOut, Rows, Tested
from transformer_nfn.report.number_text import (
    HEADINGS,
    NOTHING,
    count,
    counted,
    decimal,
    fixed,
    network_name,
    percent,
    points,
    quoted,
    setting,
    shown,
    threshold,
)


def table(
    caption: str, head: Sequence[str], rows: Iterable[str], kind: str = "", note: str = ""
) -> str:
    """A table in a box that scrolls on narrow pages; cells are HTML."""
    heading = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    after = f'<p class="note">{note}</p>' if note else ""
    label = escape(re.sub("<[^>]*>", "", caption))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="{kind}"><caption><span>{caption}</span></caption>'
        f"<thead><tr>{heading}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{after}"
    )


def models_table(tested: HeldOut) -> str:
    """Every compared model, best first: τ, R², MAE, coverage, parameters; last, the baseline.

    Next to the mean τ of the seeds is τ of their mean prediction.
    """
    zoo, names = tested.zoo, ("tau", "together", "r2", "mae")
    figures = {
        i: {name: finite(run.record.summary.get(name)) for name in names}
        | {"together": run.cell.together}
        for i, run in enumerate(zoo.finished)
    }
    best = {
        name: best_keys({i: each[name] for i, each in figures.items()}, lowest=name == "mae")
        for name in names
    }
    rows = []
    for i, run in enumerate(zoo.finished):
        held = tested.coverage(run)
        cells = {name: decimal(value) for name, value in figures[i].items()}
        cells |= {
            "tau": run.cell.text,
            "inside": percent(held and held.inside),
            "parameters": count(run.record.num_parameters),
        }
        leads = {name for name, which in best.items() if i in which}
        texts = _numbers(f"{tested.key}.m{i}", cells, leads)
        rows.append(_row(quoted(run.name), [*texts, quoted(_worth(tested, run))]))
    for run in zoo.main:
        if not run.done:
            why = f'<td colspan="7" class="why">{quoted(run.record.status)}</td>'
            rows.append(f'<tr><th scope="row">{quoted(run.name)}</th>{why}</tr>')
    accuracy, always = tested.networks.accuracy[tested.is_test], tested.always
    note = MODELS_NOTE
    if always is not None and len(accuracy):
        said, key = np.full_like(accuracy, always[0]), f"{tested.key}.mean"
        r2, mae = r_squared(accuracy, said), float(np.abs(accuracy - said).mean())
        scores = [shown(f"{key}.r2", decimal(r2)), shown(f"{key}.mae", decimal(mae))]
        texts = [NOTHING, NOTHING, *scores, NOTHING, NOTHING, NOTHING]
        rows.append(_row(f"<i>{ALWAYS_THE_MEAN}</i>", texts, "baseline"))
        others = shown(f"{key}.networks", counted(always[1], "network"))
        note += (
            f" {ALWAYS_THE_MEAN}: {shown(f'{key}.said', percent(always[0]))}, the mean of {others} "
            "outside the test part, predicted for every test network; it ranks nothing, so it has "
            "no τ."
        )
    head = ["Model", "Kendall’s τ", "Seeds together", "R²", "MAE", "In interval", "Parameters",
            "Worth examples"]  # fmt: skip
    caption = f"How well each model ranks the test networks · {quoted(zoo.label)}"
    return table(caption, head, rows, "numbers sorts", note)


MODELS_NOTE = (
    "τ with its standard error over seeds, where there are several. Seeds together: τ of the "
    "mean of all seeds’ predictions, which is what <code>tnfn predict</code> answers. MAE is "
    "in units of accuracy: a hundredth is one percentage point. In interval: the share of test "
    "networks inside their interval. Trees have no parameters to count. Worth examples: "
    "accuracies measured on so many labelled examples would rank the test networks as well as "
    "this τ, simulated with separate examples for each network: an upper bound."
)


def _worth(tested: HeldOut, run: Run) -> str:
    """How many labelled examples the mean τ of a run is worth."""
    tau, model = finite(run.record.summary.get("tau")), tested.of(run)
    if tau is None or model is None:
        return NOTHING
    accuracy = tested.networks.accuracy[model.mean.network]
    return examples_text(*worth_in_examples(accuracy, [tau]))


def _calibration(tested: HeldOut) -> str:
    """Coverage of intervals on test networks, misses on each side, and widths.

    Before the table a warning for each model whose intervals hold for significantly less than they
    aim at.
    """
    rows, warnings = [], ""
    for index, run in enumerate(tested.zoo.finished):
        held, summary = tested.coverage(run), run.record.summary
        if held is None:
            continue
        reach, aim = (finite(summary.get(name)) for name in ("radius", "level"))
        key = f"{tested.key}.m{index}"
        cells = {
            "aim": percent(aim),
            "inside": percent(held.inside),
            "below": percent(held.below),
            "above": percent(held.above),
            "width": points(held.width),
            "reach": NOTHING if reach is None else f"± {points(reach)}",
            "recorded": percent(summary.get("coverage")),
        }
        rows.append(_row(quoted(run.name), _numbers(f"{key}.calibration", cells)))
        if aim is None or held.sampled[1] >= aim:
            continue
        texts = {
            "aim": percent(aim),
            "inside": percent(held.inside),
            "networks": counted(held.networks, "test network"),
            "sampled": " to ".join(percent(end) for end in held.sampled),
        }
        text = {name: shown(f"{key}.short.{name}", text) for name, text in texts.items()}
        warnings += (
            '<p class="note warning">Calibrated on validation networks, the intervals of '
            f"<b>{quoted(run.name)}</b> are too narrow: they aim at {text['aim']} and held "
            f"{text['inside']} of {text['networks']} (<span data-quoted>95 %</span> interval of "
            f"that share: {text['sampled']}).</p>"
        )
    if not rows:
        return ""
    head = ["Model", "Aim", "In interval", "True is below", "True is above", "Mean width",
            "<code>predict</code> says", "in interval"]  # fmt: skip
    note = (
        "Counted over the test networks of all seeds; each seed’s intervals were calibrated on "
        "validation networks alone. The last two columns are of <code>tnfn predict</code>, which "
        "takes the mean of the seeds and calibrates on validation and test networks together: "
        "how far its intervals reach (farther for networks unlike those trained on), and how "
        "often they held on random halves, as the run recorded it."
    )
    caption = f"How often the intervals hold · {quoted(tested.zoo.label)}"
    return warnings + table(caption, head, rows, "numbers", note)


def paper_table(key: str, view: TableView) -> str:
    """One table of the paper, our number above and the paper's below in each cell.

    A table that the paper lacks shows ours alone.
    """
    paper = view.paper
    rows = []
    for i, (row, label) in enumerate(view.rows.items()):
        cells = []
        for j, column in enumerate(view.columns):
            ours, printed = view.ours.get((row, column)), view.paper.cell(row, column)
            theirs = f'<span class="paper">{escape(printed.text)}</span>' if printed else ""
            cells.append(_our_text(f"{key}.r{i}.c{j}", ours, row in view.best(column)) + theirs)
        rows.append(_row(quoted(label), cells))
    here = f" Here: {quoted(view.zoo)}." if view.zoo else ""
    caption = f"<b>{quoted(paper.heading)}.</b> {quoted(paper.title)}.{here}"
    note = ""
    if paper.printed:
        note += 'Upper line: this report. <span class="paper">Lower line: the paper</span>, '
        note += f"{quoted(paper.zoo)}. "
    note += quoted(paper.note)
    note += "".join(f"<br>{quoted(line)}" for line in (*view.agreements(), *view.reasons()))
    head = [escape(paper.corner), *(quoted(label) for label in view.columns.values())]
    return table(caption, head, rows, "numbers beside", note)


def _by_group(
    tested: HeldOut, kind: str, what: str, rows_of: Callable[[dict[str, np.ndarray]], Rows]
) -> str:
    """A table for each grouping of the networks; darker for larger errors, or smaller shares."""
    tables, share = "", kind == "inside"
    text = percent if share else decimal
    for number, (title, groups) in enumerate(tested.groupings.items()):
        key, found, rows = f"{tested.key}.{kind}{number}", rows_of(groups), []
        heat = {value: 1 - value if share else value
                for _, row in found for value in row if value is not None}  # fmt: skip
        top = max(heat.values(), default=0.0) or 1.0
        for r, (name, values) in enumerate(found):
            cells = "".join(
                f"<td>{NOTHING}</td>"
                if value is None
                else f'<td class="heat" style="--heat:{100 * heat[value] / top:.0f}%">'
                f"{shown(f'{key}.r{r}.c{c}', text(value))}</td>"
                for c, value in enumerate(values)
            )
            first = f"<i>{name}</i>" if name == ALWAYS_THE_MEAN else quoted(name)
            rows.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
        head = ["Model"] + [
            f"{shown(f'{key}.label{i}', escape(label))}"
            f'<span class="count">n = {shown(f"{key}.n{i}", f"{member.sum():,}")}</span>'
            for i, (label, member) in enumerate(groups.items())
        ]
        tables += (
            f"<div>{table(f'{what} by {escape(title)}, n networks', head, rows, 'numbers')}</div>"
        )
    return f'<div class="pair">{tables}</div>'


def _worst_table(key: str, tested: HeldOut, model: Tested) -> str:
    """The networks with the largest errors, named as ``tnfn predict`` reads them."""
    rows, networks, mean = [], tested.networks, model.mean
    for index, i in enumerate(tested.worst(model)):
        n, said = int(mean.network[i]), float(mean.predicted[i])
        true, low, high = float(networks.accuracy[n]), float(mean.low[i]), float(mean.high[i])
        missed = "" if low <= true <= high else ' class="missed" title="outside the interval"'
        interval = f"<span{missed}>{fixed(100 * low, 1)}–{fixed(100 * high, 1)} %</span>"
        error, run = fixed(100 * (said - true), 1), networks.run[n]
        cells = {
            "run": NOTHING if run is None else escape(str(run)),
            "true": percent(true),
            "predicted": percent(said),
            "interval": interval if mean.bounded[i] else NOTHING,
            "error": f"<b>{error if error.startswith('−') else f'+{error}'}</b>",
            **{k: escape(setting(networks.configuration[k][n])) for k in networks.settings},
        }
        name = escape(network_name(tested.reference, networks.place[n], run))
        first = shown(f"{key}.w{index}.id", f"<code>{name}</code>")
        rows.append(_row(first, _numbers(f"{key}.w{index}", cells)))
    head = ["Network", "Run", "True", "Predicted", "Interval", "Error (points)",
            *(HEADINGS[name] for name in networks.settings)]  # fmt: skip
    caption = f"Worst networks of {quoted(model.run.name)}, means over the seeds that tested them"
    return table(caption, head, rows, "numbers sorts")


def runs_table(runs: list[Run]) -> str:
    """All runs."""
    rows = []
    for index, run in enumerate(runs):
        record, chosen = run.record, run.record.selection
        place = (run.rows[0][key] for key in ("table", "row", "column"))
        where = " · ".join(filter(None, place))
        parts = " / ".join(count(chosen.get(part)) for part in ("train", "val", "test"))
        cells = [
            quoted(run.label),
            quoted(where) if where else NOTHING,
            quoted(threshold(chosen.get("min_accuracy"))),
            quoted(setting(chosen.get("augment"))),
            shown(f"run{index}.parts", parts),
            shown(f"run{index}.tau", run.cell.text)
            if run.done
            else f'<span class="why">{quoted(record.status)}</span>',
        ]
        rows.append(_row(quoted(run.name), cells))
    head = ["Model", "Zoo", "Cell", "Accuracy from", "Augmented", "Train / val / test", "τ"]
    return table(f"All {shown('runs', f'{len(runs):,}')} runs", head, rows, "numbers sorts filters")


def protocol_table(runs: list[Run]) -> str:
    """Training settings of each model; epochs are left out for trees."""
    rows = []
    for run in runs:
        settings = {k: v for k, v in run.record.protocol.items() if k != IDENTITY}
        if all(seed.get("best_epoch") is None for seed in run.record.seeds):
            settings = {"options": settings.get("options")}
        options = settings.pop("options", None)
        settings |= options if isinstance(options, dict) else {}
        text = " · ".join(
            f"{quoted(key.replace('_', ' '))} <b>{quoted(setting(value))}</b>"
            for key, value in settings.items()
        )
        rows.append(
            f'<tr><th scope="row">{quoted(run.name)}</th>'
            f'<td class="text">{text or "the model’s own settings"}</td></tr>'
        )
    return table("Protocol of each model", ["Model", "Settings"], rows)


def intervals(tested: HeldOut) -> str:
    """Coverage of the intervals of each model, and by groups of networks."""
    counted = _calibration(tested)
    heat = _by_group(tested, "inside", "In interval", tested.coverages) if counted else ""
    return f'<div class="block">{counted}</div>{heat}' if counted else ""


def failures(tested: HeldOut) -> str:
    """Errors by group, then the worst networks of each model."""
    if not tested.models:
        return ""
    choice, options, worst = f"worst-{tested.index}", "", ""
    for i, model in enumerate(tested.models):
        at = f"{tested.key}.m{tested.zoo.finished.index(model.run)}"
        options += f'<option value="{i}">{escape(model.run.name)}</option>'
        worst += (
            f'<div class="choice" data-choice="{i}"{" hidden" if i else ""}>'
            f"{_worst_table(at, tested, model)}{_predict_command(tested, model)}</div>"
        )
    return (
        f"{_by_group(tested, 'error', 'Mean absolute error', tested.errors)}"
        f'<div class="chooser"><label for="{choice}">Worst networks of</label> '
        f'<select id="{choice}">{options}</select>{worst}</div>'
    )


def _predict_command(tested: HeldOut, model: Tested) -> str:
    """The command that predicts the first of a model's worst networks."""
    run, worst = model.run, model.mean.network[tested.worst(model)]
    places = [tested.networks.place[n] for n in worst]
    if None in places:
        text = (
            "The runs count the rows of the zoo differently, so networks are named by their "
            "training: <code>tnfn report --zoo</code> finds their rows."
        )
        return f'<p class="note">{text}</p>'
    kept = any((run.folder / f"seed-{seed.get('seed')}").is_dir() for seed in run.record.seeds)
    folder = shlex.quote(str(run.folder)) if kept else "RUN"
    command = f"tnfn predict {folder} {network_name(tested.reference, places[0])}"
    text = f"A network is named as <code>predict</code> takes it: <code>{quoted(command)}</code>."
    if not kept:
        text += " This run kept no predictors; RUN is one that did."
    return f'<p class="note">{text} Before # stands the zoo, by its path from where you are.</p>'


def _row(first: str, cells: Iterable[str], kind: str = "") -> str:
    inner = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{f" class={kind}" if kind else ""}><th scope="row">{first}</th>{inner}</tr>'


def _numbers(key: str, cells: Mapping[str, str], best: Container[str] = ()) -> list[str]:
    """Cells that are numbers under ``key.name``."""
    marked = ((name, shown(f"{key}.{name}", text)) for name, text in cells.items())
    return [_best(text, name in best) for name, text in marked]


def _our_text(key: str, cell: OurCell | None, best: bool) -> str:
    if cell is None:
        return NOTHING
    if cell.reason:
        return f'<span class="why">{escape(cell.reason.partition(":")[0])}</span>'
    return _best(shown(key, escape(cell.text)), best)


def _best(text: str, best: bool) -> str:
    return f"<strong>{text}</strong>" if best else text
