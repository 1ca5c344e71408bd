"""What stands on the page of a report, section by section."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

from transformer_nfn import __version__
from transformer_nfn.paper.gather import Study, ZooStudy
from transformer_nfn.report import tables
from transformer_nfn.report.chart_data import as_script, study_data, zoo_data
from transformer_nfn.report.failures import failures, intervals
from transformer_nfn.report.held_out import HeldOut, held_out
from transformer_nfn.report.number_text import quoted, shown
from transformer_nfn.report.opening import Origin, lede, tiles, what_was_run, zoo_names
from transformer_nfn.report.whole_zoos import WholeZoo

SCRIPTS = ("plot.js", "explore.js", "panels.js", "scatter.js", "charts.js", "start.js")
# Nothing may be loaded, whatever a name in a record tries.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
# More points than this hide each other and make a chart slow; the page carries all the same.
MOST_POINTS = 1000


def page(study: Study, origin: Origin, whole: dict[str, WholeZoo] | None = None) -> str:
    """The whole page.

    Args:
        study: the runs.
        origin: when and how it was written.
        whole: the zoos themselves where they were given, by label.
    """
    whole = whole or {}
    tested = [_within(held_out(zoo), whole.get(zoo.label)) for zoo in study.zoos]
    drawn = [
        zoo_data(zoo, part, study.curves.get(zoo.label), whole.get(zoo.label))
        for zoo, part in zip(study.zoos, tested, strict=True)
    ]
    data = {"zoos": drawn, "mostPoints": MOST_POINTS, **study_data(study)}
    sections = [
        ("run", "What was run", what_was_run(study, origin, whole)),
        ("models", "The models", _models(study, tested)),
        ("paper", "Beside the paper", _beside_the_paper(study)),
        ("curve", "Learning curve", _learning_curves(study, drawn)),
        ("figures", "Figures", _figures(study, drawn)),
        ("intervals", "The intervals", _intervals(study, tested)),
        ("failures", "Where the predictor fails", _failures(study, tested, drawn)),
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
<title>Accuracy from weights · {escape(zoo_names(study))}</title>
<link rel="icon" href="data:,">
<style>
{_asset("style.css")}</style>
</head>
<body>
<header class="top"><div class="inner">
<p class="kicker">transformer-nfn · report</p>
<h1>How accurate is a network, <em>judging by its weights</em>?</h1>
<p class="lede">{lede(study)}</p>
{tiles(study, tested)}
</div></header>
<nav aria-label="Sections"><div class="inner"><button type="button" class="fold" \
aria-expanded="false" aria-controls="sections">Sections</button>\
<div class="links" id="sections">{links}</div></div></nav>
<main class="inner">
<noscript><p class="note">The figures need JavaScript; text and tables do not.</p></noscript>
{body}</main>
<footer class="inner"><p>Written {quoted(origin.date)} by transformer-nfn \
{quoted(__version__)} from {shown("folders", f"{len(study.runs):,}")} run folders. Standard \
errors are over seeds. The paper’s numbers are as printed there.</p></footer>
<div id="tip" role="tooltip" hidden></div>
<div id="said" class="unseen" aria-live="polite"></div>
<script type="application/json" id="data">{as_script(data)}</script>
<script>
"use strict";
{"".join(_asset(name) for name in SCRIPTS)}</script>
</body>
</html>
"""


def _within(tested: HeldOut, whole: WholeZoo | None) -> HeldOut:
    """Rows as the given zoo counts them, and its accuracies."""
    if whole is None:
        return tested
    return tested.within(whole.rows_of(tested.networks), whole.accuracy)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _models(study: Study, tested: list[HeldOut]) -> str:
    blocks = []
    for index, zoo in enumerate(study.zoos):
        if not zoo.main:
            continue
        # One row in two on a wide screen: the table, and the same numbers as a picture.
        chart = _figure("taus", index, zoo, "τ of each model, with its standard error; small "
                        "marks are seeds.") if zoo.finished else ""  # fmt: skip
        compared = tables.models_table(f"z{index}", zoo, tested[index])
        blocks.append(f'<div class="pair"><div>{compared}</div>{chart}</div>')
    return "".join(blocks)


def _beside_the_paper(study: Study) -> str:
    return "".join(
        f'<div class="block">{tables.paper_table(f"t{i}", view)}</div>'
        for i, view in enumerate(study.tables)
    )


def _learning_curves(study: Study, drawn: list[dict[str, Any]]) -> str:
    blocks = []
    places = {label: len(study.tables) + i for i, label in enumerate(study.curves)}
    for index, (zoo, data) in enumerate(zip(study.zoos, drawn, strict=True)):
        if zoo.label in study.curves:
            chart = _sizes_figure(index, zoo) if data["sizes"] else ""
            table = tables.paper_table(f"t{places[zoo.label]}", study.curves[zoo.label])
            blocks.append(
                f'{_zoo_title(study, zoo)}<div class="block">{chart}</div>'
                f'<div class="block">{table}</div>'
            )
    return "".join(blocks)


def _sizes_figure(index: int, zoo: ZooStudy) -> str:
    caption = "τ against the number of networks trained on; bars are standard errors."
    return _figure("sizes", index, zoo, caption)


def _figures(study: Study, drawn: list[dict[str, Any]]) -> str:
    blocks = []
    for index, (zoo, data) in enumerate(zip(study.zoos, drawn, strict=True)):
        parts = []
        if data["parts"]:
            parts.append(_figure("scatter", index, zoo, _scatter_caption(f"z{index}", data)))
        if data["histogram"]:
            total = shown(f"z{index}.histogram", f"{data['histogram']['total']:,}")
            which = "networks of the zoo at the checkpoint that was read."
            if data["everything"] is None:
                which = (
                    "networks in validation and test parts. Those to train on are not in the "
                    "run folders: <code>tnfn report --zoo</code> adds them."
                )
            parts.append(_figure("histogram", index, zoo, f"Accuracies of the {total} {which}"))
        if data["sizes"] and zoo.label not in study.curves:
            parts.append(_sizes_figure(index, zoo))
        if data["curves"]:
            parts.append(_figure(
                "curve-val_tau", index, zoo,
                "τ on the validation part by epoch; thin lines are seeds, thick ones their mean, "
                "dots the epoch that was kept of each seed.",
            ))  # fmt: skip
            parts.append(_figure("curve-loss", index, zoo, "Training loss by epoch."))
        if parts:
            blocks.append(f'{_zoo_title(study, zoo)}<div class="figures">{"".join(parts)}</div>')
    return "".join(blocks)


def _scatter_caption(key: str, data: dict[str, Any]) -> str:
    """Says whose predictions are drawn, and how many of them."""
    seeds = max(len(model["seeds"]) for model in data["models"])
    whose = "of the only seed"
    if seeds > 1:
        whose = "as the mean over the seeds that tested it, or of the seed chosen"
    caption = (
        f"Predicted against true accuracy on the test networks, each prediction {whose}; on the "
        "diagonal it is right, the level line is what always saying the mean gives. τ is that "
        "of the table: the mean over seeds, or the chosen seed’s. Point at a network, or focus a "
        "chart and use the arrow keys, to see its configuration."
    )
    most = max(len(_tested_places(model, data["parts"])) for model in data["models"])
    if most > MOST_POINTS:
        caption += (
            f" Of {shown(f'{key}.drawn.total', f'{most:,}')} networks "
            f"{shown(f'{key}.drawn.shown', f'{MOST_POINTS:,}')} are drawn."
        )
    return caption


def _tested_places(model: dict[str, Any], parts: list[list[int]]) -> set[int]:
    return {place for seed in model["seeds"] if "part" in seed for place in parts[seed["part"]]}


def _figure(kind: str, index: int, zoo: ZooStudy, caption: str) -> str:
    """A chart to be drawn, and its caption, which names the zoo for whoever cuts it out."""
    return (
        f'<figure class="chart {kind}" data-chart="{kind}" data-zoo="{index}">'
        f'<div class="canvas"></div><figcaption>{caption} Zoo: {quoted(zoo.label)}.</figcaption>'
        "</figure>"
    )


def _intervals(study: Study, tested: list[HeldOut]) -> str:
    blocks = []
    for index, (zoo, part) in enumerate(zip(study.zoos, tested, strict=True)):
        found = intervals(f"z{index}", zoo, part)
        if found:
            caption = (
                "Share of test networks inside their interval; small marks are seeds, the upright "
                "line is the aim."
            )
            chart = _figure("calibration", index, zoo, caption)
            blocks.append(f'{_zoo_title(study, zoo)}<div class="block">{chart}</div>{found}')
    return "".join(blocks)


def _failures(study: Study, tested: list[HeldOut], drawn: list[dict[str, Any]]) -> str:
    blocks = []
    for index, (zoo, part) in enumerate(zip(study.zoos, tested, strict=True)):
        found = failures(index, zoo, part, drawn[index]["zoo"])
        if found:
            blocks.append(f"{_zoo_title(study, zoo)}{found}")
    return "".join(blocks)


def _zoo_title(study: Study, zoo: ZooStudy) -> str:
    return f"<h3>{quoted(zoo.label)}</h3>" if len(study.zoos) > 1 else ""


def _every_run(study: Study) -> str:
    return f"<details><summary>Show all runs</summary>{tables.runs_table(study.runs)}</details>"
