"""The tables of the report as HTML: models compared, cells beside the paper's, errors, runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from transformer_nfn.paper.gather import Run, ZooStudy
from transformer_nfn.paper.table_text import OurCell, TableView, mean_text, zoo_seeds
from transformer_nfn.prediction.identity import KEY, OLDER_KEY
from transformer_nfn.prediction.records import CONFIGURATION, RunRecord
from transformer_nfn.report.findings import ErrorTable, WorstNetwork
from transformer_nfn.seed_kinds import seeds_text

NOTHING = '<span class="none">–</span>'
HEADINGS = {
    "optimizer": "Optimiser",
    "learning_rate": "Learning rate",
    "l2": "L2",
    "init_std": "Init std",
    "dropout": "Dropout",
    "train_fraction": "Train fraction",
}


def table(
    caption: str, head: Sequence[str], rows: Iterable[str], kind: str = "", note: str = ""
) -> str:
    """A table in a box of its own that scrolls where the page is narrow; cells are HTML."""
    heading = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    after = f'<p class="note">{note}</p>' if note else ""
    label = escape(plain_text(caption))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="{kind}"><caption><span>{caption}</span></caption>'
        f"<thead><tr>{heading}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{after}"
    )


def plain_text(html: str) -> str:
    """The text of simple HTML, for a label."""
    out, inside = [], False
    for character in html:
        if character == "<":
            inside = True
        elif character == ">":
            inside = False
        elif not inside:
            out.append(character)
    return "".join(out)


def models_table(zoo: ZooStudy) -> str:
    """Every compared model, best first: τ, R², MAE, coverage, parameters."""
    runs = [*zoo.finished, *(run for run in zoo.main if not run.done)]
    best = {
        "tau": _extreme(zoo.finished, "tau", max),
        "r2": _extreme(zoo.finished, "r2", max),
        "mae": _extreme(zoo.finished, "mae", min),
    }
    rows = []
    for run in runs:
        first = f'<th scope="row">{escape(run.name)}</th>'
        if not run.done:
            rows.append(f'<tr>{first}<td colspan="5" class="why">{escape(run.record.status)}</td>')
            continue
        summary = run.record.summary
        error = summary.get("tau_se") if len(run.record.seeds) > 1 else None
        cells = [
            _best(mean_text(_real(summary, "tau"), error), _at(summary, "tau") == best["tau"]),
            _best(decimal(_real(summary, "r2")), _at(summary, "r2") == best["r2"]),
            _best(decimal(_real(summary, "mae")), _at(summary, "mae") == best["mae"]),
            percent(_real(summary, "coverage")),
            NOTHING if run.record.num_parameters is None else f"{run.record.num_parameters:,}",
        ]
        rows.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = ["Model", "Kendall’s τ", "R²", "MAE", "Coverage", "Parameters"]
    seeds = sorted({len(run.record.seeds) for run in zoo.finished})
    note = "One seed only, so τ has no standard error. "
    if seeds and seeds[-1] > 1:
        number = "–".join(str(n) for n in sorted({seeds[0], seeds[-1]}))
        note = f"τ with its standard error over {number} seeds. "
    known = (_real(run.record.summary, "level") for run in zoo.finished)
    levels = [level for level in known if level is not None]
    aim = f", which aims at {100 * max(levels):g} %" if levels else ""
    note += (
        "MAE is in units of accuracy (0.01 is one percentage point). Coverage is the share of "
        f"held-out networks inside their interval{aim}. Trees have no parameters to count."
    )
    return table(f"How well each model ranks the test networks · {escape(zoo.label)}", head, rows,
                 "numbers", note)  # fmt: skip


def paper_table(view: TableView) -> str:
    """One table of the paper, our number above and the paper's below in each cell.

    A table that the paper has not shows ours alone.
    """
    paper = view.paper
    rows = []
    for row, label in view.rows.items():
        cells = []
        for column in view.columns:
            ours, printed = view.ours.get((row, column)), view.paper_cell(row, column)
            theirs = f'<span class="paper">{escape(printed.text)}</span>' if printed else ""
            empty = ours is None and not printed
            text = NOTHING if empty else _our_text(ours, row in view.best(column)) + theirs
            cells.append(f"<td>{text}</td>")
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(cells)}</tr>')
    here = f" Here: {escape(view.zoo)}." if view.zoo else ""
    caption = f"<b>{paper.heading}.</b> {escape(paper.title)}.{here}"
    note = ""
    if paper.printed:
        note += 'Upper line: this report. <span class="paper">Lower line: the paper</span>, '
        note += f"{escape(paper.zoo)}. "
    note += escape(paper.note)
    note += "".join(f"<br>{escape(said)}" for said in (*view.agreements(), *view.reasons()))
    head = [escape(paper.corner), *(escape(label) for label in view.columns.values())]
    return table(caption, head, rows, "numbers beside", note)


def error_table(errors: ErrorTable) -> str:
    """Mean absolute errors, the larger the darker."""
    known = [error for _, row in errors.rows for error in row if error is not None]
    top = max(known, default=0.0) or 1.0
    rows = []
    for name, values in errors.rows:
        cells = "".join(
            f"<td>{NOTHING}</td>"
            if value is None
            else f'<td class="heat" style="--heat:{100 * value / top:.0f}%">{value:.3f}</td>'
            for value in values
        )
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    head = ["Model"] + [
        f'{escape(label)}<span class="count">n = {count:,}</span>' for label, count in errors.groups
    ]
    caption = f"Mean absolute error by {escape(errors.title)}, n networks"
    return table(caption, head, rows, "numbers")


def worst_table(name: str, networks: list[WorstNetwork]) -> str:
    """The networks furthest from their prediction."""
    rows = []
    for network in networks:
        bounds = np.isfinite(network.low) and np.isfinite(network.high)
        interval = f"{100 * network.low:.1f}–{100 * network.high:.1f} %" if bounds else NOTHING
        missed = ' class="missed" title="outside the interval"' if network.outside else ""
        cells = [
            percent(network.accuracy),
            percent(network.predicted),
            f"<b>{100 * network.error:+.1f}</b>".replace("-", "−"),
            *(escape(setting(network.configuration[key])) for key in CONFIGURATION),
        ]
        cells.insert(2, f"<span{missed}>{interval}</span>")
        first = f'<th scope="row">#{escape(str(network.run))}</th>'
        rows.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = ["Network", "True", "Predicted", "Interval", "Error (points)", *HEADINGS.values()]
    return table(f"Worst networks of {escape(name)}", head, rows, "numbers")


def runs_table(runs: list[Run]) -> str:
    """Every run that was read."""
    rows = []
    for run in runs:
        record, chosen = run.record, run.record.selection
        cell = record.table or {}
        where = " · ".join(str(cell[key]) for key in ("table", "row", "column") if key in cell)
        cells = [
            escape(_zoo_name(record)),
            escape(where) or NOTHING,
            escape(threshold(chosen.get("min_accuracy"))),
            escape(setting(chosen.get("augment"))),
            " / ".join(count(chosen.get(part)) for part in ("train", "val", "test")),
            mean_text(_real(record.summary, "tau"), _real(record.summary, "tau_se"))
            if run.done
            else f'<span class="why">{escape(record.status)}</span>',
        ]
        first = f'<th scope="row">{escape(run.name)}</th>'
        rows.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = ["Model", "Zoo", "Cell", "Accuracy from", "Augmented", "Train / val / test", "τ"]
    return table(f"All {len(runs):,} runs", head, rows, "numbers")


def _zoo_name(record: RunRecord) -> str:
    name, kind = str(record.zoo.get("name") or record.zoo.get("task") or ""), zoo_seeds(record)
    return name if kind is None else f"{name}, {seeds_text(kind)}"


def protocol_table(runs: list[Run]) -> str:
    """How each model was trained, as its record says; epochs do not concern trees."""
    rows = []
    for run in runs:
        settings = {k: v for k, v in run.record.protocol.items() if k not in (KEY, OLDER_KEY)}
        if all(seed.get("best_epoch") is None for seed in run.record.seeds):
            settings = {"options": settings.get("options")}
        options = settings.pop("options", None)
        settings |= options if isinstance(options, dict) else {}
        text = " · ".join(
            f"{escape(key.replace('_', ' '))} <b>{escape(setting(value))}</b>"
            for key, value in settings.items()
        )
        rows.append(
            f'<tr><th scope="row">{escape(run.name)}</th>'
            f'<td class="text">{text or "the model’s own settings"}</td></tr>'
        )
    return table("Protocol of each model", ["Model", "Settings"], rows)


def decimal(value: float | None) -> str:
    """Three decimals, or a dash."""
    return NOTHING if value is None or value != value else f"{value:.3f}".replace("-", "−")


def percent(value: float | None) -> str:
    """A share in percent, or a dash."""
    return NOTHING if value is None or not np.isfinite(value) else f"{100 * value:.1f} %"


def threshold(value: Any) -> str:
    """From which accuracy on networks were taken."""
    return "all" if not value else f"{100 * float(value):g} %"


def count(value: Any) -> str:
    """A number of networks, or a dash."""
    return f"{value:,}" if isinstance(value, int) else NOTHING


def setting(value: Any) -> str:
    """A value of a configuration in the shortest form."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def _our_text(cell: OurCell | None, best: bool) -> str:
    if cell is None:
        return NOTHING
    if cell.reason:
        return f'<span class="why">{escape(cell.reason.partition(":")[0])}</span>'
    return _best(escape(cell.text), best)


def _best(text: str, best: bool) -> str:
    return f"<strong>{text}</strong>" if best else text


def _real(summary: Any, key: str) -> float | None:
    value = summary.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        return None
    return float(value)


def _at(summary: Any, key: str) -> float | None:
    value = _real(summary, key)
    return None if value is None else round(value, 3)


def _extreme(runs: list[Run], key: str, choose: Any) -> float | None:
    """The best value as printed, None where there is nothing to compare."""
    found = [value for run in runs if (value := _at(run.record.summary, key)) is not None]
    return choose(found) if len(found) > 1 else float("nan")
