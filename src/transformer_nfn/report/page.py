"""The page of a report: one self-contained HTML file about any number of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformer_nfn import __version__
from transformer_nfn.io.assets import resolve
from transformer_nfn.io.files import write_text
from transformer_nfn.known_tasks import seeds_text
from transformer_nfn.paper.gather import ABOUT, Run, Study, ZooStudy, gather
from transformer_nfn.paper.table_text import mean_tau, mean_text, zoo_seeds, zoo_size
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.report import tables
from transformer_nfn.report.chart_data import as_script, study_data, zoo_data, zoo_reference
from transformer_nfn.report.findings import calibration
from transformer_nfn.report.held_out import HeldOut, NamedZoo, held_out, named_zoos
from transformer_nfn.report.number_text import (
    NOTHING,
    count,
    counted,
    decimal,
    percent,
    points,
    quoted,
    shown,
    threshold,
)

SCRIPTS = ("plot.js", "explore.js", "panels.js", "scatter.js", "charts.js", "start.js")
# Nothing may be loaded, whatever a name in a record tries.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
# More points than this hide each other and make a chart slow; the page carries all the same.
MOST_POINTS = 1000


@dataclass(frozen=True)
class Origin:
    """Time of writing, and the command that writes the page."""

    written: datetime
    command: str

    @property
    def date(self) -> str:
        """The time of writing as text."""
        return f"{self.written:%Y-%m-%d %H:%M} UTC"


def write_report(
    folders: Sequence[Path | str], out: Path | str, *, zoos: Sequence[Path | str] = ()
) -> None:
    """Write one HTML page about every run in or below the folders.

    The page is self-contained: style, scripts and data are in it. It is written atomically.

    Args:
        folders: run folders, folders that hold some, or names of predictors (`tnfn assets`).
        out: the page.
        zoos: the zoos of the runs, by path or name, to show all of their networks and to name
            rows by these paths; each must be the zoo of some of the runs.
    """
    if not folders:
        raise RunError("a report needs at least one folder with runs")
    study = gather([resolve(folder, "predictor") for folder in folders])
    target = Path(out)
    if target.is_dir():
        raise RunError(f"'{target}' is a folder, not a file to write a report to")
    named = [str(zoo) for zoo in zoos]
    options = [word for zoo in named for word in ("--zoo", zoo)]
    words = ["tnfn", "report", *(str(f) for f in folders), *options, "--out", str(out)]
    origin = Origin(datetime.now(UTC), shlex.join(words))
    write_text(target, page(study, origin, named_zoos(study, named)))


def page(study: Study, origin: Origin, sources: dict[str, NamedZoo] | None = None) -> str:
    """The HTML of the page.

    Args:
        study: the runs.
        origin: time of writing and command.
        sources: the named zoos, by label.
    """
    sources = sources or {}
    tested = [
        held_out(zoo).within(sources[zoo.label]) if zoo.label in sources else held_out(zoo)
        for zoo in study.zoos
    ]
    drawn = [
        zoo_data(zoo, part, study.curves.get(zoo.label), sources.get(zoo.label))
        for zoo, part in zip(study.zoos, tested, strict=True)
    ]
    data = {
        "zoos": drawn,
        "mostPoints": MOST_POINTS,
        "headings": tables.HEADINGS,
        **study_data(study),
    }
    sections = [
        ("run", "What was run", what_was_run(study, origin, sources)),
        ("models", "The models", _models(study, tested)),
        ("paper", "Beside the paper", _beside_the_paper(study)),
        ("curve", "Learning curve", _learning_curves(study, drawn)),
        ("figures", "Figures", _figures(study, drawn)),
        ("intervals", "The intervals", _intervals(study, tested)),
        ("failures", "Where the predictor fails", _failures(study, tested, sources)),
        ("runs", "Every run", _every_run(study)),
    ]
    present = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in present)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{title}</h2>{content}</section>'
        for key, title, content in present
    )
    return f"""{page_head(f"Accuracy from weights · {escape(zoo_names(study))}")}<body>
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
{"".join(asset(name) for name in SCRIPTS)}</script>
</body>
</html>
"""


def page_head(title: str) -> str:
    """Everything before the body of a page; the title is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{asset("style.css")}</style>
</head>
"""


def asset(name: str) -> str:
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
            which = "networks of the zoo that could be chosen."
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
    """Caption that states whose predictions are drawn, and how many."""
    seeds = max(len(model["seeds"]) for model in data["models"])
    whose = "of the only seed"
    if seeds > 1:
        whose = "as the mean over the seeds that tested it, or of the seed chosen"
    caption = (
        f"Predicted against true accuracy on the test networks, each prediction {whose}; on the "
        "diagonal it is right, the level line is what always saying the mean gives. τ is that "
        f"of the table{': the mean over seeds, or the chosen seed’s' if seeds > 1 else ''}. Point "
        "at a network, or focus a chart and use the arrow keys, to see its numbers."
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
    """A chart to be drawn, with a caption that names the zoo."""
    return (
        f'<figure class="chart {kind}" data-chart="{kind}" data-zoo="{index}">'
        f'<div class="canvas"></div><figcaption>{caption} Zoo: {quoted(zoo.label)}.</figcaption>'
        "</figure>"
    )


def _intervals(study: Study, tested: list[HeldOut]) -> str:
    blocks = []
    for index, (zoo, part) in enumerate(zip(study.zoos, tested, strict=True)):
        found = tables.intervals(f"z{index}", zoo, part)
        if found:
            caption = (
                "Share of test networks inside their interval; small marks are seeds, the upright "
                "line is the aim."
            )
            chart = _figure("calibration", index, zoo, caption)
            blocks.append(f'{_zoo_title(study, zoo)}<div class="block">{chart}</div>{found}')
    return "".join(blocks)


def _failures(study: Study, tested: list[HeldOut], sources: dict[str, NamedZoo]) -> str:
    blocks = []
    for index, (zoo, part) in enumerate(zip(study.zoos, tested, strict=True)):
        reference = zoo_reference(zoo, sources.get(zoo.label))
        found = tables.failures(index, zoo, part, reference)
        if found:
            blocks.append(f"{_zoo_title(study, zoo)}{found}")
    return "".join(blocks)


def _zoo_title(study: Study, zoo: ZooStudy) -> str:
    return f"<h3>{quoted(zoo.label)}</h3>" if len(study.zoos) > 1 else ""


def _every_run(study: Study) -> str:
    return f"<details><summary>Show all runs</summary>{tables.runs_table(study.runs)}</details>"


def zoo_names(study: Study) -> str:
    """Labels of all zoos."""
    return "; ".join(zoo.label for zoo in study.zoos)


def lede(study: Study) -> str:
    """One sentence: which models predict what, and which is best."""
    targets = " and the ".join(dict.fromkeys(run.target.what for run in study.runs))
    text = (
        f"{_who(study)} the {quoted(targets)} of transformers from nothing but their weights: "
        f"{quoted(zoo_names(study))}."
    )
    titles = [zoo.label.partition(",")[0] for zoo in study.zoos]
    for index, (zoo, title) in enumerate(zip(study.zoos, titles, strict=True)):
        if zoo.best and len(zoo.finished) > 1:
            tau = shown(f"z{index}.lede.tau", decimal(zoo.best.record.summary.get("tau")))
            # Zoos of one task and name differ in size or seeds, which the full label states.
            name = title if titles.count(title) == 1 else zoo.label
            where = f" on {quoted(name)}" if len(study.zoos) > 1 else ""
            text += f" Best{where}: <b>{quoted(zoo.best.name)}</b>, τ&nbsp;=&nbsp;{tau}."
    return text


def _who(study: Study) -> str:
    """The compared models; where there are none, the variants in tables."""
    compared = {run.record.model for zoo in study.zoos for run in zoo.finished}
    if compared:
        verb = "predicts" if len(compared) == 1 else "predict"
        return f"{shown('models', counted(len(compared), 'model'))} {verb}"
    done = [run for run in study.runs if run.done]
    if not done:
        return "No finished run predicts"
    names = ", ".join(dict.fromkeys(run.name for run in done))
    verb = "predicts" if len(done) == 1 else "predict"
    return f"{shown('variants', counted(len(done), 'variant'))} of {quoted(names)} {verb}"


def tiles(study: Study, tested: list[HeldOut]) -> str:
    """The four large numbers, of the zoo with most models."""
    if not study.zoos:
        return ""
    index = max(range(len(study.zoos)), key=lambda i: _weight(study.zoos[i]))
    zoo = study.zoos[index]
    if zoo.best is None:
        return ""
    record, key = zoo.best.record, f"z{index}.tile"
    tau = mean_text(*mean_tau(record))
    model = tested[index].of(zoo.best)
    held = None if model is None else calibration(tested[index], model)
    size = zoo_size(record.zoo)
    of_all = "" if size is None else f"of {shown(f'{key}.size', f'{size:,}')} in the zoo"
    entries = [
        ("best Kendall’s τ", "tau", tau, quoted(zoo.best.name)),
        ("mean absolute error", "mae", points(record.summary.get("mae")), quoted(zoo.best.name)),
        ("inside the interval", "inside", percent(held and held.inside), "of test networks"),
        ("networks to train on", "train", count(record.selection.get("train")), of_all),
    ]
    blocks = "".join(
        f'<div class="tile"><dt>{label}<span>{below}</span></dt>'
        f"<dd>{shown(f'{key}.{name}', value)}</dd></div>"
        for label, name, value, below in entries
    )
    # With one zoo the sentence above has named it.
    heading = f'<p class="tiles-of">{quoted(zoo.label)}</p>' if len(study.zoos) > 1 else ""
    return f'{heading}<dl class="tiles" aria-label="{escape(zoo.label)}">{blocks}</dl>'


def _weight(zoo: ZooStudy) -> tuple[int, int]:
    return len(zoo.finished), len(zoo.runs)


def what_was_run(study: Study, origin: Origin, sources: dict[str, NamedZoo]) -> str:
    """Date and command; for each zoo its facts and how each model was trained."""
    blocks = [
        f'<dl class="facts"><div><dt>Written</dt><dd><time datetime="'
        f'{origin.written:%Y-%m-%dT%H:%MZ}">{quoted(origin.date)}</time></dd></div>'
        f'<div class="wide"><dt>Command</dt><dd><code>{quoted(origin.command)}</code></dd></div>'
        f"{_left_out(study.others)}</dl>"
    ]
    for index, zoo in enumerate(study.zoos):
        facts = _facts(index, zoo, sources.get(zoo.label))
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        blocks.append(f'<h3>{quoted(zoo.label)}</h3><dl class="facts">{items}</dl>')
        protocols = [run for run in zoo.main if run.record.protocol]
        if protocols:
            blocks.append(
                "<details><summary>Protocol of each model</summary>"
                f"{tables.protocol_table(protocols)}</details>"
            )
    return "".join(blocks)


def _left_out(others: Sequence[Run]) -> str:
    """Runs that the report is not about."""
    if not others:
        return ""
    names = ", ".join(f"{run.folder} ({run.target.what})" for run in others)
    text = f"{quoted(names)}: {quoted(ABOUT)}"
    return f'<div class="wide"><dt>Runs left out</dt><dd>{text}</dd></div>'


def _facts(index: int, zoo: ZooStudy, source: NamedZoo | None) -> list[tuple[str, str]]:
    run = zoo.best or (zoo.main or zoo.runs)[0]
    record, chosen = run.record, run.record.selection
    seeds = sorted({str(seed.get("seed")) for run in zoo.runs for seed in run.record.seeds})
    size, kind, key = zoo_size(record.zoo), zoo_seeds(record), f"z{index}.facts"
    read = len({run.record.model for run in zoo.runs})
    parts = " / ".join(count(chosen.get(part)) for part in ("train", "val", "test"))
    seed_list = f"{len(seeds)} ({escape(', '.join(seeds))})"
    of_runs = [
        ("Their seeds", NOTHING if kind is None else quoted(seeds_text(kind))),
        ("Their checkpoints", quoted_count(record.zoo.get("networks"))),
        ("Checkpoints read", _checkpoint(run.percent)),
        ("Accuracy from", quoted(threshold(chosen.get("min_accuracy")))),
    ]
    return [
        ("Zoo", f"<code>{quoted(str(record.zoo.get('name') or 'unknown'))}</code>"
         if source is None else f"<code>{quoted(source.text)}</code>"),
        ("Task", quoted(str(record.zoo.get("task", "unknown")))),
        ("Predicted", quoted(run.target.what)),
        ("Networks in the zoo", NOTHING if size is None else shown(f"{key}.size", f"{size:,}")),
        *([] if run.own else of_runs),
        ("Architecture", _architecture(record.zoo)),
        ("Train / validation / test", shown(f"{key}.parts", parts)),
        ("Seeds of the predictors", shown(f"{key}.seeds", seed_list) if seeds else NOTHING),
        ("Models compared", shown(f"{key}.compared", str(len(zoo.finished)))),
        ("Models with runs", shown(f"{key}.models", str(read))),
        ("Runs read", shown(f"{key}.runs", f"{len(zoo.runs):,}")),
    ]  # fmt: skip


def quoted_count(value: Any) -> str:
    """A count from a record."""
    return quoted(f"{value:,}") if isinstance(value, int) else NOTHING


def _architecture(zoo: Mapping[str, Any]) -> str:
    """Sizes of the networks of a zoo, or their families."""
    value = zoo.get("architecture")
    if isinstance(value, dict) and {"blocks", "d_model", "heads"} <= value.keys():
        return quoted(f"{value['blocks']} blocks, width {value['d_model']}, {value['heads']} heads")
    families = [f"{count:,} {name}" for name, count in zoo.get("families", {}).items()]
    names = ", ".join(families or zoo.get("architectures", ()))
    return quoted(names) if names else NOTHING


def _checkpoint(percent: Any) -> str:
    if not isinstance(percent, int | float):
        return "all"
    return quoted(f"at {percent:g} % of training")
