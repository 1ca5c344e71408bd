"""The page of a report: one self-contained HTML file about any number of runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from transformer_nfn import __version__
from transformer_nfn.io.files import write_text
from transformer_nfn.io.location import Location
from transformer_nfn.known_tasks import seeds_text
from transformer_nfn.paper.gather import ABOUT, Run, Study, gather
from transformer_nfn.paper.rows import OurCell, zoo_seeds, zoo_size
from transformer_nfn.paper.table_text import curve_lines
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.report import figures, tables
from transformer_nfn.report.held_out import HeldOut, held_out, within_zoos
from transformer_nfn.report.number_text import (
    NOTHING,
    count,
    counted,
    decimal,
    quoted,
    shown,
    threshold,
)
from transformer_nfn.report.plot import SYMBOLS, Plot, asset, tag


def write_report(
    folders: Sequence[Path | str], out: Path | str, *, zoos: Sequence[Path | str] = ()
) -> None:
    """Write one HTML page about every run in or below the folders.

    The page is self-contained: figures, style and script are in it. It is written atomically.

    Args:
        folders: run folders, folders that hold some, or names of predictors (`tnfn assets`).
        out: the page.
        zoos: the zoos of the runs, by path or name, to show all of their networks and to name
            rows by these paths; each must be the zoo of some of the runs.
    """
    if not folders:
        raise RunError("a report needs at least one folder with runs")
    study = gather([Location.of(folder).folder("predictor") for folder in folders])
    target = Path(out)
    if target.is_dir():
        raise RunError(f"'{target}' is a folder, not a file to write a report to")
    named = [str(zoo) for zoo in zoos]
    options = [word for zoo in named for word in ("--zoo", zoo)]
    words = ["tnfn", "report", *(str(f) for f in folders), *options, "--out", str(out)]
    parts = within_zoos([held_out(i, zoo) for i, zoo in enumerate(study.zoos)], named)
    write_text(target, _page(study, parts, shlex.join(words)))


def _page(study: Study, parts: Sequence[HeldOut], command: str) -> str:
    """The HTML of the page."""
    written = datetime.now(UTC)
    by_zoo = partial(_by_zoo, parts)
    sections = [
        ("run", "What was run", _what_was_run(study, parts, written, command)),
        ("models", "The models", "".join(map(_models, parts))),
        ("paper", "Beside the paper", _beside_the_paper(study)),
        ("curve", "Learning curve", by_zoo(lambda part: _learning_curve(study, part))),
        ("figures", "Figures", by_zoo(lambda part: _figures(study, part))),
        ("intervals", "The intervals", by_zoo(tables.intervals)),
        ("failures", "Where the predictor fails", by_zoo(tables.failures)),
        ("runs", "Every run", _folded("Show all runs", tables.runs_table(study.runs))),
    ]
    present = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in present)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{title}</h2>{content}</section>'
        for key, title, content in present
    )
    return html_page(
        title=f"Accuracy from weights · {escape(_zoo_names(study))}",
        kicker="report",
        heading="How accurate is a network, <em>judging by its weights</em>?",
        lede=f'<p class="lede">{_lede(study)}</p>',
        nav='<nav aria-label="Sections"><div class="inner"><button type="button" class="fold" '
        'aria-expanded="false" aria-controls="sections">Sections</button>'
        f'<div class="links" id="sections">{links}</div></div></nav>',
        body=body,
        footer=f"Written {quoted(f'{written:%Y-%m-%d %H:%M} UTC')} by transformer-nfn "
        f"{quoted(__version__)} from {shown('folders', f'{len(study.runs):,}')} run folders. "
        "Standard errors are over seeds. The paper’s numbers are as printed there.",
        script=f"<script>\n{asset('start.js')}</script>",
    )


def html_page(**parts: str) -> str:
    """A page of ``page.html``; its parts are HTML, and those that are left out are empty.

    Its policy lets nothing be loaded, whatever a name in a record tries.
    """
    empty = dict.fromkeys(("lede", "nav", "script"), "")
    style = asset("plot.css") + asset("style.css")
    return Template(asset("page.html")).substitute(empty, style=style, **parts)


def _by_zoo(parts: Sequence[HeldOut], block: Callable[[HeldOut], str]) -> str:
    """The block of each zoo that has one, under its label where there are several zoos."""
    blocks = [(part, html) for part in parts if (html := block(part))]
    titles = [f"<h3>{quoted(part.zoo.label)}</h3>" if len(parts) > 1 else "" for part, _ in blocks]
    return "".join(title + html for title, (_, html) in zip(titles, blocks, strict=True))


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _models(part: HeldOut) -> str:
    if not part.zoo.main:
        return ""
    # One row in two on a wide screen: the table, and the same numbers as a picture.
    chart = ""
    if plot := figures.taus(part):
        caption = "τ of each model, with its standard error; small marks are seeds."
        chart = _figure("taus", part, [plot], caption)
    return f'<div class="pair"><div>{tables.models_table(part)}</div>{chart}</div>'


def _beside_the_paper(study: Study) -> str:
    return "".join(
        f'<div class="block">{tables.paper_table(f"t{i}", view)}</div>'
        for i, view in enumerate(study.tables)
    )


def _learning_curve(study: Study, part: HeldOut) -> str:
    label = part.zoo.label
    if label not in study.curves:
        return ""
    key = f"t{len(study.tables) + list(study.curves).index(label)}"
    chart = _sizes_figure(part, curve_lines(study.curves[label]))
    table = tables.paper_table(key, study.curves[label])
    return f'<div class="block">{chart}</div><div class="block">{table}</div>'


def _sizes_figure(part: HeldOut, by_model: Mapping[str, Sequence[OurCell]]) -> str:
    if not by_model:
        return ""
    caption = "τ against the number of networks trained on; bars are standard errors."
    plot = figures.sizes(by_model, "τ by number of training networks")
    return _figure("sizes", part, [plot], caption)


def _figures(study: Study, part: HeldOut) -> str:
    found = []
    if panels := figures.scatter(part):
        found.append(_figure("scatter", part, panels, _scatter_caption(part), _key(part)))
    accuracy = part.networks.accuracy if part.everything is None else part.everything
    if len(accuracy):
        total = shown(f"{part.key}.histogram", f"{len(accuracy):,}")
        which = "networks of the zoo that could be chosen."
        if part.everything is None:
            which = (
                "networks in validation and test parts. Those to train on are not in the "
                "run folders: <code>tnfn report --zoo</code> adds them."
            )
        plot = figures.histogram(accuracy, "Accuracies of the networks")
        found.append(_figure("histogram", part, [plot], f"Accuracies of the {total} {which}"))
    if part.zoo.label not in study.curves:
        found.append(_sizes_figure(part, part.zoo.by_size()))
    for field, title, label, caption in (
        ("val_tau", "Validation τ while training", "validation τ",
         "τ on the validation part by epoch; thin lines are seeds, thick ones their mean, "
         "large dots the epoch that was kept of each seed."),
        ("loss", "Loss while training", "loss", "Training loss by epoch."),
    ):  # fmt: skip
        if curve := figures.training(part, field, title, label):
            found.append(_figure(f"curve-{field}", part, [curve], caption))
    return f'<div class="figures">{"".join(found)}</div>' if any(found) else ""


def _scatter_caption(part: HeldOut) -> str:
    """Caption that states whose predictions are drawn, and how many."""
    seeds = max(len(model.seeds) for model in part.models)
    whose = "of the only seed" if seeds == 1 else "as the mean over the seeds that tested it"
    caption = (
        f"Predicted against true accuracy on the test networks, each prediction {whose}; on the "
        "diagonal it is right, the level line is what always saying the mean gives. τ is that "
        f"of the table{': the mean over seeds' if seeds > 1 else ''}. Point at a network to see "
        "which it is."
    )
    most = max(len(model.mean.network) for model in part.models)
    if most > figures.MOST_POINTS:
        caption += (
            f" Of {shown(f'{part.key}.drawn.total', f'{most:,}')} networks "
            f"{shown(f'{part.key}.drawn.shown', f'{figures.MOST_POINTS:,}')} are drawn."
        )
    return caption


def _key(part: HeldOut) -> str:
    """Marks of the optimisers."""
    names = (
        f"<span>{tag('span', SYMBOLS[int(kind[1:])], class_=kind)} {quoted(name)}</span>"
        for kind, name in figures.optimizers(part)
    )
    return f'<p class="key">{"".join(names)}</p>'


def _figure(kind: str, part: HeldOut, plots: Sequence[Plot], caption: str, key: str = "") -> str:
    """One plot under its title, or panels; the caption names the zoo."""
    drawn = "".join(plot.svg() for plot in plots)
    if kind == "scatter":
        drawn = f'<div class="panels">{drawn}</div>'
    else:
        drawn = f'<div class="title">{escape(plots[0].title)}</div>{drawn}'
    return (
        f'<figure class="chart {kind}" data-chart="{kind}" data-zoo="{part.index}">'
        f"{drawn}{key}<figcaption>{caption} Zoo: {quoted(part.zoo.label)}.</figcaption></figure>"
    )


def _zoo_names(study: Study) -> str:
    """Labels of all zoos."""
    return "; ".join(zoo.label for zoo in study.zoos)


def _lede(study: Study) -> str:
    """One sentence: which models predict what, and which is best."""
    targets = " and the ".join(dict.fromkeys(run.target.what for run in study.runs))
    text = (
        f"{_who(study)} the {quoted(targets)} of transformers from nothing but their weights: "
        f"{quoted(_zoo_names(study))}."
    )
    for index, zoo in enumerate(study.zoos):
        if zoo.best and len(zoo.finished) > 1:
            tau = shown(f"z{index}.lede.tau", decimal(zoo.best.record.summary.get("tau")))
            where = f" on {quoted(zoo.label)}" if len(study.zoos) > 1 else ""
            text += f" Best{where}: <b>{quoted(zoo.best.name)}</b>, τ&nbsp;=&nbsp;{tau}."
    return text


def _who(study: Study) -> str:
    """Number of models with a finished run, with the verb."""
    models = {run.record.model for run in study.runs if run.done}
    verb = "predicts" if len(models) == 1 else "predict"
    return f"{shown('models', counted(len(models), 'model'))} {verb}"


def _what_was_run(study: Study, parts: Sequence[HeldOut], written: datetime, command: str) -> str:
    """Date and command; for each zoo its facts and how each model was trained."""
    blocks = [
        f'<dl class="facts"><div><dt>Written</dt><dd><time datetime="'
        f'{written:%Y-%m-%dT%H:%MZ}">{quoted(f"{written:%Y-%m-%d %H:%M} UTC")}</time></dd></div>'
        f'<div class="wide"><dt>Command</dt><dd><code>{quoted(command)}</code></dd></div>'
        f"{_left_out(study.others)}</dl>"
    ]
    for part in parts:
        facts = _facts(part)
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        blocks.append(f'<h3>{quoted(part.zoo.label)}</h3><dl class="facts">{items}</dl>')
        protocols = [run for run in part.zoo.main if run.record.protocol]
        if protocols:
            blocks.append(_folded("Protocol of each model", tables.protocol_table(protocols)))
    return "".join(blocks)


def _left_out(others: Sequence[Run]) -> str:
    """Runs that the report is not about."""
    if not others:
        return ""
    names = ", ".join(f"{run.folder} ({run.target.what})" for run in others)
    text = f"{quoted(names)}: {quoted(ABOUT)}"
    return f'<div class="wide"><dt>Runs left out</dt><dd>{text}</dd></div>'


def _facts(part: HeldOut) -> list[tuple[str, str]]:
    zoo, run = part.zoo, part.zoo.example
    record, chosen = run.record, run.record.selection
    seeds = sorted({str(seed.get("seed")) for run in zoo.runs for seed in run.record.seeds})
    size, kind, key = zoo_size(run.rows[0]), zoo_seeds(run.rows[0]), f"{part.key}.facts"
    read = len({run.record.model for run in zoo.runs})
    parts = " / ".join(count(chosen.get(part)) for part in ("train", "val", "test"))
    seed_list = f"{len(seeds)} ({escape(', '.join(seeds))})"
    of_runs = [
        ("Their seeds", NOTHING if kind is None else quoted(seeds_text(kind))),
        ("Their checkpoints", f"<span data-quoted>{count(record.zoo.get('networks'))}</span>"),
        ("Checkpoints read", "all" if run.percent is None
         else quoted(f"at {run.percent:g} % of training")),
        ("Accuracy from", quoted(threshold(chosen.get("min_accuracy")))),
    ]  # fmt: skip
    return [
        ("Zoo", f"<code>{quoted(part.reference)}</code>"),
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
    ]


def _architecture(zoo: Mapping[str, Any]) -> str:
    """Sizes of the networks of a zoo, or their families."""
    value = zoo.get("architecture")
    if isinstance(value, dict) and {"blocks", "d_model", "heads"} <= value.keys():
        return quoted(f"{value['blocks']} blocks, width {value['d_model']}, {value['heads']} heads")
    families = [f"{count:,} {name}" for name, count in zoo.get("families", {}).items()]
    if layout := zoo.get("layout"):
        numbers = sum(math.prod(shape) for shape in layout.values())
        families = [f"{numbers:,} weights in {len(layout)} tensors"]
    names = ", ".join(families or zoo.get("architectures", ()))
    return quoted(names) if names else NOTHING
