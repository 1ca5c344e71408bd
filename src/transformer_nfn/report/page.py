"""What stands on the page of a report, section by section."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from transformer_nfn import __version__
from transformer_nfn.paper.gather import Study, ZooStudy
from transformer_nfn.paper.table_text import mean_text, zoo_seeds, zoo_size
from transformer_nfn.report import findings, tables
from transformer_nfn.report.chart_data import as_script, zoo_data
from transformer_nfn.seed_kinds import seeds_text

SCRIPTS = ("plot.js", "explore.js", "scatter.js", "charts.js", "start.js")
# Nothing may be loaded, whatever a name in a record tries.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def page(study: Study) -> str:
    """The whole page."""
    drawn = [zoo_data(zoo, study.curves.get(zoo.label)) for zoo in study.zoos]
    sections = [
        ("run", "What was run", _what_was_run(study)),
        ("models", "The models", _models(study)),
        ("paper", "Beside the paper", _beside_the_paper(study)),
        ("curve", "Learning curve", _learning_curves(study, drawn)),
        ("figures", "Figures", _figures(study, drawn)),
        ("failures", "Where the predictor fails", _failures(study)),
        ("runs", "Every run", _every_run(study)),
    ]
    present = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in present)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{title}</h2>{content}</section>'
        for key, title, content in present
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>Accuracy from weights · {escape(_zoo_names(study))}</title>
<link rel="icon" href="data:,">
<style>
{_asset("style.css")}</style>
</head>
<body>
<header class="top"><div class="inner">
<p class="kicker">transformer-nfn · report</p>
<h1>How accurate is a network, <em>judging by its weights</em>?</h1>
<p class="lede">{_lede(study)}</p>
{_tiles(study)}
</div></header>
<nav aria-label="Sections"><div class="inner">{links}</div></nav>
<main class="inner">
<noscript><p class="note">The figures need JavaScript; text and tables do not.</p></noscript>
{body}</main>
<footer class="inner"><p>Written by transformer-nfn {escape(__version__)} from \
{len(study.runs):,} run folders. Standard errors are over seeds. The paper’s numbers are as \
printed there.</p></footer>
<div id="tip" role="tooltip" hidden></div>
<div id="said" class="unseen" aria-live="polite"></div>
<script type="application/json" id="data">{as_script(drawn)}</script>
<script>
"use strict";
{"".join(_asset(name) for name in SCRIPTS)}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _zoo_names(study: Study) -> str:
    return "; ".join(zoo.label for zoo in study.zoos)


def _lede(study: Study) -> str:
    models = {run.record.model for run in study.runs}
    text = (
        f"{_count(len(models), 'model')} predict the test accuracy of small transformers from "
        f"nothing but their weights: {escape(_zoo_names(study))}."
    )
    titles = [zoo.label.partition(",")[0] for zoo in study.zoos]
    for zoo, title in zip(study.zoos, titles, strict=True):
        if zoo.best and len(zoo.finished) > 1:
            tau = f"τ&nbsp;=&nbsp;{tables.decimal(zoo.best.record.summary.get('tau'))}"
            # Zoos of one task and name differ in size or seeds, which the whole label tells.
            name = title if titles.count(title) == 1 else zoo.label
            where = f" on {escape(name)}" if len(study.zoos) > 1 else ""
            text += f" Best{where}: <b>{escape(zoo.best.name)}</b>, {tau}."
    return text


def _tiles(study: Study) -> str:
    zoo = max(study.zoos, key=lambda zoo: (len(zoo.finished), len(zoo.runs)))
    if zoo.best is None:
        return ""
    record = zoo.best.record
    several = len(record.seeds) > 1
    tau = mean_text(record.summary.get("tau"), record.summary.get("tau_se") if several else None)
    size = zoo_size(record.zoo)
    entries = [
        ("best Kendall’s τ", tau, zoo.best.name),
        ("mean absolute error", _points(record.summary.get("mae")), zoo.best.name),
        (
            "inside the interval",
            tables.percent(record.summary.get("coverage")),
            "of held-out networks",
        ),
        (
            "networks to train on",
            tables.count(record.selection.get("train")),
            "" if size is None else f"of {size:,} in the zoo",
        ),
    ]
    tiles = "".join(
        f'<div class="tile"><dt>{label}<span>{escape(below)}</span></dt><dd>{value}</dd></div>'
        for label, value, below in entries
    )
    # With one zoo the sentence above has named it.
    heading = f'<p class="tiles-of">{escape(zoo.label)}</p>' if len(study.zoos) > 1 else ""
    return f'{heading}<dl class="tiles" aria-label="{escape(zoo.label)}">{tiles}</dl>'


def _what_was_run(study: Study) -> str:
    blocks = []
    for zoo in study.zoos:
        run = zoo.best or (zoo.main or zoo.runs)[0]
        record, chosen = run.record, run.record.selection
        seeds = sorted({str(seed.get("seed")) for run in zoo.runs for seed in run.record.seeds})
        size, kind = zoo_size(record.zoo), zoo_seeds(record)
        facts = [
            ("Task", escape(str(record.zoo.get("task", "unknown")))),
            ("Networks in the zoo", tables.NOTHING if size is None else f"{size:,}"),
            ("Their seeds", tables.NOTHING if kind is None else seeds_text(kind)),
            ("Their checkpoints", tables.count(record.zoo.get("networks"))),
            ("Architecture", _architecture(record.zoo.get("architecture"))),
            ("Checkpoints read", _checkpoint(chosen.get("percent"))),
            ("Accuracy from", tables.threshold(chosen.get("min_accuracy"))),
            (
                "Train / validation / test",
                " / ".join(tables.count(chosen.get(part)) for part in ("train", "val", "test")),
            ),
            (
                "Seeds of the predictors",
                f"{len(seeds)} ({escape(', '.join(seeds))})" if seeds else tables.NOTHING,
            ),
            ("Models", str(len({run.record.model for run in zoo.runs}))),
            ("Runs read", f"{len(zoo.runs):,}"),
        ]
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        blocks.append(f'<h3>{escape(zoo.label)}</h3><dl class="facts">{items}</dl>')
        protocols = [run for run in zoo.main if run.record.protocol]
        if protocols:
            blocks.append(
                "<details><summary>Protocol of each model</summary>"
                f"{tables.protocol_table(protocols)}</details>"
            )
    return "".join(blocks)


def _models(study: Study) -> str:
    blocks = []
    for index, zoo in enumerate(study.zoos):
        if not zoo.main:
            continue
        # One row in two on a wide screen: the table, and the same numbers as a picture.
        chart = _figure("taus", index, zoo, "τ of each model, with its standard error; small "
                        "marks are seeds.") if zoo.finished else ""  # fmt: skip
        blocks.append(f'<div class="pair"><div>{tables.models_table(zoo)}</div>{chart}</div>')
    return "".join(blocks)


def _beside_the_paper(study: Study) -> str:
    return "".join(f'<div class="block">{tables.paper_table(view)}</div>' for view in study.tables)


def _learning_curves(study: Study, drawn: list[dict[str, Any]]) -> str:
    blocks = []
    for index, (zoo, data) in enumerate(zip(study.zoos, drawn, strict=True)):
        if zoo.label in study.curves:
            title = f"<h3>{escape(zoo.label)}</h3>" if len(study.zoos) > 1 else ""
            chart = _sizes_figure(index, zoo) if data["sizes"] else ""
            table = tables.paper_table(study.curves[zoo.label])
            blocks.append(
                f'{title}<div class="block">{chart}</div><div class="block">{table}</div>'
            )
    return "".join(blocks)


def _sizes_figure(index: int, zoo: ZooStudy) -> str:
    caption = "τ against the number of networks trained on; bars are standard errors."
    return _figure("sizes", index, zoo, caption)


def _figures(study: Study, drawn: list[dict[str, Any]]) -> str:
    blocks = []
    for index, (zoo, data) in enumerate(zip(study.zoos, drawn, strict=True)):
        parts = []
        if data["scatter"]:
            most = max(panel["total"] for panel in data["scatter"])
            shown = max(len(panel["network"]) for panel in data["scatter"])
            thinned = f" Of {most:,} networks {shown:,} are drawn." if shown < most else ""
            parts.append(_figure(
                "scatter", index, zoo,
                "Predicted against true accuracy on the test networks of one seed; on the "
                "diagonal the prediction is right. Point at a network, or focus a chart and use "
                f"the arrow keys, to see its configuration.{thinned}",
            ))  # fmt: skip
        if data["histogram"]:
            parts.append(_figure(
                "histogram", index, zoo,
                f"Accuracies of the {data['histogram']['total']:,} networks in validation and "
                "test parts.",
            ))  # fmt: skip
        if data["sizes"] and zoo.label not in study.curves:
            parts.append(_sizes_figure(index, zoo))
        if data["curves"]:
            parts.append(_figure(
                "curve-val_tau", index, zoo,
                "τ on the validation part by epoch; thin lines are seeds, thick ones their mean.",
            ))  # fmt: skip
            parts.append(_figure("curve-loss", index, zoo, "Training loss by epoch."))
        if parts:
            title = f"<h3>{escape(zoo.label)}</h3>" if len(study.zoos) > 1 else ""
            blocks.append(f'{title}<div class="figures">{"".join(parts)}</div>')
    return "".join(blocks)


def _figure(kind: str, index: int, zoo: ZooStudy, caption: str) -> str:
    """A chart to be drawn, and its caption, which names the zoo for whoever cuts it out."""
    caption = f"{caption} Zoo: {zoo.label}."
    return (
        f'<figure class="chart {kind}" data-chart="{kind}" data-zoo="{index}">'
        f'<div class="canvas"></div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _failures(study: Study) -> str:
    blocks = []
    for index, zoo in enumerate(study.zoos):
        with_points = [run for run in zoo.finished if run.tested is not None]
        if not with_points:
            continue
        found = [findings.errors_by_optimizer(zoo), findings.errors_by_accuracy(zoo)]
        errors = [table for table in found if table is not None]
        title = f"<h3>{escape(zoo.label)}</h3>" if len(study.zoos) > 1 else ""
        sentence = _sentence(zoo, errors)
        heat = "".join(f"<div>{tables.error_table(table)}</div>" for table in errors)
        options = "".join(
            f'<option value="{i}">{escape(run.name)}</option>' for i, run in enumerate(with_points)
        )
        worst = "".join(
            f'<div class="choice" data-choice="{i}"{" hidden" if i else ""}>'
            f"{tables.worst_table(run.name, findings.worst_networks(run))}</div>"
            for i, run in enumerate(with_points)
        )
        blocks.append(
            f'{title}<p class="prose">{sentence}</p><div class="pair">{heat}</div>'
            f'<div class="chooser"><label for="worst-{index}">Worst networks of</label> '
            f'<select id="worst-{index}">{options}</select>{worst}</div>'
        )
    return "".join(blocks)


def _sentence(zoo: ZooStudy, errors: Iterable[findings.ErrorTable]) -> str:
    """The finding in words, for the best model."""
    run = zoo.best
    if run is None or run.tested is None or not len(run.tested["row"]):
        return "Errors are predicted less true accuracy."
    part = run.tested
    off = part["predicted"] - part["accuracy"]
    text = (
        f"<b>{escape(run.name)}</b>, the best model, is off by {_points(np.abs(off).mean())} on "
        f"average and by {_points(np.abs(off).max())} at worst"
    )
    side = "high" if off.mean() > 0 else "low"
    bias = abs(off.mean())
    text += "." if bias < 5e-4 else f"; it guesses too {side} by {_points(bias)} overall."
    worst = [
        f"{escape(group)} ({_points(error)})"
        for table in errors
        if run.name in dict(table.rows) and (found := table.worst(run.name))
        for group, error in [found]
    ]
    if worst:
        text += f" It errs most on networks of {' and of accuracy '.join(worst)}."
    return text


def _every_run(study: Study) -> str:
    return f"<details><summary>Show all runs</summary>{tables.runs_table(study.runs)}</details>"


def _architecture(value: Any) -> str:
    """A network of the zoo in words."""
    if not isinstance(value, dict) or not {"blocks", "d_model", "heads"} <= value.keys():
        return tables.NOTHING
    return escape(f"{value['blocks']} blocks, width {value['d_model']}, {value['heads']} heads")


def _checkpoint(percent: Any) -> str:
    if not isinstance(percent, int | float):
        return "all"
    return f"at {percent:g} % of training"


def _points(value: Any) -> str:
    """A difference of accuracies in percentage points."""
    if not isinstance(value, int | float | np.number) or not np.isfinite(value):
        return tables.NOTHING
    return f"{100 * float(value):.1f} points"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
