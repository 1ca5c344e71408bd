"""The sections on trust: how often intervals hold, and where the predictors fail."""

from __future__ import annotations

import shlex
from html import escape

import numpy as np

from transformer_nfn.paper.gather import Run, ZooStudy
from transformer_nfn.report import findings, tables
from transformer_nfn.report.held_out import HeldOut
from transformer_nfn.report.number_text import network_name, points, quoted, shown


def intervals(key: str, zoo: ZooStudy, tested: HeldOut) -> str:
    """How often they hold: of each model, and by groups of networks."""
    counted = tables.calibration_table(key, zoo, tested)
    if not counted:
        return ""
    shares = [findings.inside_table(tested, grouping) for grouping in findings.groupings(tested)]
    heat = "".join(
        f"<div>{tables.group_table(f'{key}.inside{i}', table, 'In interval', share=True)}</div>"
        for i, table in enumerate(shares)
    )
    return f'<div class="block">{counted}</div><div class="pair">{heat}</div>'


def failures(index: int, zoo: ZooStudy, tested: HeldOut, reference: str) -> str:
    """Errors by group in a sentence and as tables, then the worst networks of each model.

    Args:
        index: of the zoo on the page.
        zoo: its runs.
        tested: what they say of held-out networks.
        reference: how ``tnfn predict`` is told the zoo.
    """
    if not tested.models:
        return ""
    key = f"z{index}"
    errors = [findings.error_table(tested, grouping) for grouping in findings.groupings(tested)]
    heat = "".join(
        f"<div>{tables.group_table(f'{key}.error{i}', table, 'Mean absolute error')}</div>"
        for i, table in enumerate(errors)
    )
    options, worst = "", ""
    for i, model in enumerate(tested.models):
        at = f"{key}.m{zoo.finished.index(model.run)}"
        networks = findings.worst_networks(tested, model)
        options += f'<option value="{i}">{escape(model.name)}</option>'
        worst += (
            f'<div class="choice" data-choice="{i}"{" hidden" if i else ""}>'
            f"{tables.worst_table(at, model.name, reference, networks)}"
            f"{_how_to_ask(model.run, reference, networks)}</div>"
        )
    return (
        f'<p class="prose">{_sentence(key, zoo, tested, errors, reference)}</p>'
        f'<div class="pair">{heat}</div>'
        f'<div class="chooser"><label for="worst-{index}">Worst networks of</label> '
        f'<select id="worst-{index}">{options}</select>{worst}</div>'
    )


def _how_to_ask(run: Run, reference: str, networks: list[findings.WorstNetwork]) -> str:
    """The command that predicts the first network of a table again."""
    if any(network.row is None for network in networks):
        text = (
            "The runs count the rows of the zoo differently, so networks are named by their "
            "training: <code>tnfn report --zoo</code> finds their rows."
        )
        return f'<p class="note">{text}</p>'
    kept = any((run.folder / f"seed-{seed.get('seed')}").is_dir() for seed in run.record.seeds)
    folder = shlex.quote(str(run.folder)) if kept else "RUN"
    command = f"tnfn predict {folder} {network_name(reference, networks[0].row)}"
    text = f"A network is named as <code>predict</code> takes it: <code>{quoted(command)}</code>."
    if not kept:
        text += " This run kept no predictors; RUN is one that did."
    return f'<p class="note">{text} Before # stands the zoo, by its path from where you are.</p>'


def _sentence(
    key: str, zoo: ZooStudy, tested: HeldOut, errors: list[findings.GroupTable], reference: str
) -> str:
    """The finding in words, for the best model; every number stands in a table below it too."""
    run = zoo.best
    model = None if run is None else tested.of(run)
    if model is None:
        return "Errors are predicted less true accuracy."
    part = model.rows
    off = part.predicted - tested.networks.accuracy[part.network]
    worst = findings.worst_networks(tested, model, 1)[0]
    name = network_name(reference, worst.row, worst.run)
    text = (
        f"<b>{quoted(model.name)}</b>, the best model, is off by "
        f"{shown(f'{key}.best.mae', points(np.abs(off).mean()))} on average. Furthest off is "
        f"{shown(f'{key}.best.network', f'<code>{escape(name)}</code>')}, by "
        f"{shown(f'{key}.best.worst', points(abs(worst.error)))}"
        f"{', the mean of its seeds' if len(model.seeds) > 1 else ''}."
    )
    bias = float(off.mean())
    if abs(bias) >= 5e-4:
        side = "high" if bias > 0 else "low"
        text += f" It guesses too {side} by {shown(f'{key}.best.bias', points(abs(bias)))} overall."
    bands = [
        f"{shown(f'{at}.label', escape(group))} ({shown(f'{at}.error', points(error))}, n = "
        f"{shown(f'{at}.n', f'{count:,}')})"
        for i, table in enumerate(errors)
        if (found := table.worst(model.name))
        for group, error, count in [found]
        for at in [f"{key}.best.band{i}"]
    ]
    if bands:
        titles = [table.title for table in errors if table.worst(model.name)]
        joined = " and ".join(
            f"of {'accuracy ' if title != 'optimiser' else ''}{band}"
            for title, band in zip(titles, bands, strict=True)
        )
        text += f" It errs most on networks {joined}."
    return text
