"""The tables of the report as HTML, and the sections on intervals and failures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape

import numpy as np

from transformer_nfn.paper.gather import Run
from transformer_nfn.paper.numbers import examples_text, mean_text
from transformer_nfn.paper.table_text import (
    OurCell,
    TableView,
    best_keys,
    finite,
    mean_tau,
    place,
    seeds_together,
)
from transformer_nfn.prediction.metrics import worth_in_examples
from transformer_nfn.prediction.runs import IDENTITY
from transformer_nfn.report.findings import (
    ALWAYS_THE_MEAN,
    Baseline,
    GroupTable,
    WorstNetwork,
    baseline,
    calibration,
    error_table,
    groupings,
    inside_table,
    worst_networks,
)
from transformer_nfn.report.held_out import HeldOut
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
    zoo = tested.zoo
    figures = [
        {name: finite(run.record.summary.get(name)) for name in ("tau", "r2", "mae")}
        | {"together": seeds_together(run.record)}
        for run in zoo.finished
    ]
    best = {
        name: best_keys({i: values[name] for i, values in enumerate(figures)}, lowest=name == "mae")
        for name in ("tau", "together", "r2", "mae")
    }
    rows = []
    for index, (run, values) in enumerate(zip(zoo.finished, figures, strict=True)):
        size, held = run.record.num_parameters, calibration(tested, run)
        cells = {
            "tau": mean_text(*mean_tau(run.record)),
            "together": decimal(values["together"]),
            "r2": decimal(values["r2"]),
            "mae": decimal(values["mae"]),
            "inside": percent(held and held.inside),
            "parameters": count(size),
        }
        leads = {name for name, which in best.items() if index in which}
        texts = _numbers(f"{tested.key}.m{index}", cells, leads)
        rows.append(_row(quoted(run.name), [*texts, quoted(_worth(tested, run))]))
    for run in zoo.main:
        if not run.done:
            why = f'<td colspan="7" class="why">{quoted(run.record.status)}</td>'
            rows.append(f'<tr><th scope="row">{quoted(run.name)}</th>{why}</tr>')
    always = baseline(tested)
    if always is not None:
        scores = [
            shown(f"{tested.key}.mean.{name}", decimal(getattr(always, name)))
            for name in ("r2", "mae")
        ]
        texts = [NOTHING, NOTHING, *scores, NOTHING, NOTHING, NOTHING]
        rows.append(_row(f"<i>{ALWAYS_THE_MEAN}</i>", texts, "baseline"))
    head = ["Model", "Kendall’s τ", "Seeds together", "R²", "MAE", "In interval", "Parameters",
            "Worth examples"]  # fmt: skip
    caption = f"How well each model ranks the test networks · {quoted(zoo.label)}"
    return table(caption, head, rows, "numbers sorts", _models_note(tested.key, always))


def _worth(tested: HeldOut, run: Run) -> str:
    """How many labelled examples the mean τ of a run is worth."""
    tau, model = finite(run.record.summary.get("tau")), tested.of(run)
    if tau is None or model is None:
        return NOTHING
    networks = np.unique(np.concatenate([part.network for part in model.seeds]))
    return examples_text(*worth_in_examples(tested.networks.accuracy[networks], [tau]))


def _models_note(key: str, always: Baseline | None) -> str:
    note = (
        "τ with its standard error over seeds, where there are several. Seeds together: τ of the "
        "mean of all seeds’ predictions, which is what <code>tnfn predict</code> answers. MAE is "
        "in units of accuracy: a hundredth is one percentage point. In interval: the share of test "
        "networks inside their interval. Trees have no parameters to count. Worth examples: "
        "accuracies measured on so many labelled examples would rank the test networks as well as "
        "this τ, simulated with separate examples for each network: an upper bound."
    )
    if always is not None:
        mean = shown(f"{key}.mean.said", percent(always.predicted))
        others = shown(f"{key}.mean.networks", counted(always.networks, "network"))
        note += (
            f" {ALWAYS_THE_MEAN}: {mean}, the mean of {others} outside the test part, predicted "
            "for every test network; it ranks nothing, so it has no τ."
        )
    return note


def calibration_table(tested: HeldOut) -> str:
    """Coverage of intervals on test networks, misses on each side, and widths."""
    rows = []
    for index, run in enumerate(tested.zoo.finished):
        held, summary = calibration(tested, run), run.record.summary
        if held is None:
            continue
        reach = finite(summary.get("radius"))
        cells = {
            "aim": percent(summary.get("level")),
            "inside": percent(held.inside),
            "below": percent(held.below),
            "above": percent(held.above),
            "width": points(held.width),
            "reach": NOTHING if reach is None else f"± {points(reach)}",
            "recorded": percent(summary.get("coverage")),
        }
        at = f"{tested.key}.m{index}.calibration"
        rows.append(_row(quoted(run.name), _numbers(at, cells)))
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
    return table(caption, head, rows, "numbers", note)


def too_narrow(tested: HeldOut) -> str:
    """A warning for each model whose intervals hold for significantly less than they aim at."""
    warnings = ""
    for index, run in enumerate(tested.zoo.finished):
        held, level = calibration(tested, run), finite(run.record.summary.get("level"))
        if held is None or not held.falls_short(level):
            continue
        texts = {
            "aim": percent(level),
            "inside": percent(held.inside),
            "networks": counted(held.networks, "test network"),
            "sampled": " to ".join(percent(end) for end in held.sampled),
        }
        at = f"{tested.key}.m{index}.short"
        text = {name: shown(f"{at}.{name}", text) for name, text in texts.items()}
        warnings += (
            '<p class="note warning">Calibrated on validation networks, the intervals of '
            f"<b>{quoted(run.name)}</b> are too narrow: they aim at {text['aim']} and held "
            f"{text['inside']} of {text['networks']} (<span data-quoted>95 %</span> interval of "
            f"that share: {text['sampled']}).</p>"
        )
    return warnings


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


def group_table(key: str, groups: GroupTable, what: str, *, share: bool = False) -> str:
    """Values by groups of networks; darker for larger errors, or smaller shares."""
    known = [value for _, row in groups.rows for value in row if value is not None]
    top = max((1 - value if share else value for value in known), default=0.0) or 1.0
    rows = []
    for index, (name, values) in enumerate(groups.rows):
        cells = ""
        for column, value in enumerate(values):
            if value is None:
                cells += f"<td>{NOTHING}</td>"
                continue
            heat = 100 * (1 - value if share else value) / top
            text = shown(f"{key}.r{index}.c{column}", percent(value) if share else decimal(value))
            cells += f'<td class="heat" style="--heat:{heat:.0f}%">{text}</td>'
        first = f"<i>{name}</i>" if name == ALWAYS_THE_MEAN else quoted(name)
        rows.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    head = ["Model"] + [
        f"{shown(f'{key}.label{i}', escape(group.label))}"
        f'<span class="count">n = {shown(f"{key}.n{i}", f"{group.count:,}")}</span>'
        for i, group in enumerate(groups.grouping.groups)
    ]
    caption = f"{what} by {escape(groups.grouping.title)}, n networks"
    return table(caption, head, rows, "numbers")


def worst_table(key: str, name: str, zoo: str, networks: list[WorstNetwork]) -> str:
    """The networks with the largest errors, named as ``tnfn predict`` reads them."""
    rows = []
    for index, network in enumerate(networks):
        bounds = np.isfinite(network.low) and np.isfinite(network.high)
        low, high = (fixed(100 * end, 1) if bounds else "" for end in (network.low, network.high))
        missed = ' class="missed" title="outside the interval"' if network.outside else ""
        error = fixed(100 * network.error, 1)
        cells = {
            "run": NOTHING if network.run is None else escape(str(network.run)),
            "true": percent(network.accuracy),
            "predicted": percent(network.predicted),
            "interval": f"<span{missed}>{low}–{high} %</span>" if bounds else NOTHING,
            "error": f"<b>{error if error.startswith('−') else f'+{error}'}</b>",
            **{name: escape(setting(value)) for name, value in network.configuration.items()},
        }
        at = f"{key}.w{index}"
        name_of = escape(network_name(zoo, network.place, network.run))
        first = shown(f"{at}.id", f"<code>{name_of}</code>")
        rows.append(_row(first, _numbers(at, cells)))
    head = ["Network", "Run", "True", "Predicted", "Interval", "Error (points)",
            *(HEADINGS[name] for name in networks[0].configuration)]  # fmt: skip
    caption = f"Worst networks of {quoted(name)}, means over the seeds that tested them"
    return table(caption, head, rows, "numbers sorts")


def runs_table(runs: list[Run]) -> str:
    """All runs."""
    rows = []
    for index, run in enumerate(runs):
        record, chosen = run.record, run.record.selection
        where = " · ".join(filter(None, place(record)))
        tau = mean_text(*mean_tau(record))
        parts = " / ".join(count(chosen.get(part)) for part in ("train", "val", "test"))
        cells = [
            quoted(run.label),
            quoted(where) if where else NOTHING,
            quoted(threshold(chosen.get("min_accuracy"))),
            quoted(setting(chosen.get("augment"))),
            shown(f"run{index}.parts", parts),
            shown(f"run{index}.tau", tau)
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
    counted = calibration_table(tested)
    if not counted:
        return ""
    shares = [inside_table(tested, grouping) for grouping in groupings(tested)]
    heat = _side_by_side(f"{tested.key}.inside", shares, "In interval", share=True)
    return f'<div class="block">{too_narrow(tested)}{counted}</div>{heat}'


def _side_by_side(key: str, tables: list[GroupTable], what: str, *, share: bool = False) -> str:
    inner = "".join(
        f"<div>{group_table(f'{key}{i}', each, what, share=share)}</div>"
        for i, each in enumerate(tables)
    )
    return f'<div class="pair">{inner}</div>'


def failures(tested: HeldOut) -> str:
    """Errors by group, then the worst networks of each model."""
    if not tested.models:
        return ""
    key, choice = tested.key, f"worst-{tested.index}"
    errors = [error_table(tested, grouping) for grouping in groupings(tested)]
    options, worst = "", ""
    for i, model in enumerate(tested.models):
        at = f"{key}.m{tested.zoo.finished.index(model.run)}"
        networks = worst_networks(tested, model)
        options += f'<option value="{i}">{escape(model.run.name)}</option>'
        worst += (
            f'<div class="choice" data-choice="{i}"{" hidden" if i else ""}>'
            f"{worst_table(at, model.run.name, tested.reference, networks)}"
            f"{_predict_command(model.run, tested.reference, networks)}</div>"
        )
    return (
        f"{_side_by_side(f'{key}.error', errors, 'Mean absolute error')}"
        f'<div class="chooser"><label for="{choice}">Worst networks of</label> '
        f'<select id="{choice}">{options}</select>{worst}</div>'
    )


def _predict_command(run: Run, reference: str, networks: list[WorstNetwork]) -> str:
    """The command that predicts the first network of a table."""
    if any(network.place is None for network in networks):
        text = (
            "The runs count the rows of the zoo differently, so networks are named by their "
            "training: <code>tnfn report --zoo</code> finds their rows."
        )
        return f'<p class="note">{text}</p>'
    kept = any((run.folder / f"seed-{seed.get('seed')}").is_dir() for seed in run.record.seeds)
    folder = shlex.quote(str(run.folder)) if kept else "RUN"
    command = f"tnfn predict {folder} {network_name(reference, networks[0].place)}"
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
