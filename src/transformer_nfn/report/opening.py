"""The opening of the page: what it is about, the four large numbers, and what was run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any

from transformer_nfn.paper.gather import Study, ZooStudy
from transformer_nfn.paper.table_text import mean_text, zoo_seeds, zoo_size
from transformer_nfn.report import tables
from transformer_nfn.report.findings import calibration
from transformer_nfn.report.held_out import HeldOut
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
from transformer_nfn.report.whole_zoos import WholeZoo
from transformer_nfn.seed_kinds import seeds_text


@dataclass(frozen=True)
class Origin:
    """When the page was written, and the command that writes it again."""

    written: datetime
    command: str

    @property
    def date(self) -> str:
        """As people and programs read it."""
        return f"{self.written:%Y-%m-%d %H:%M} UTC"


def zoo_names(study: Study) -> str:
    """The zoos in words."""
    return "; ".join(zoo.label for zoo in study.zoos)


def lede(study: Study) -> str:
    """One sentence on who predicts what, and who does it best."""
    text = (
        f"{_who(study)} the test accuracy of small transformers from nothing but their weights: "
        f"{quoted(zoo_names(study))}."
    )
    titles = [zoo.label.partition(",")[0] for zoo in study.zoos]
    for index, (zoo, title) in enumerate(zip(study.zoos, titles, strict=True)):
        if zoo.best and len(zoo.finished) > 1:
            tau = shown(f"z{index}.lede.tau", decimal(zoo.best.record.summary.get("tau")))
            # Zoos of one task and name differ in size or seeds, which the whole label tells.
            name = title if titles.count(title) == 1 else zoo.label
            where = f" on {quoted(name)}" if len(study.zoos) > 1 else ""
            text += f" Best{where}: <b>{quoted(zoo.best.name)}</b>, τ&nbsp;=&nbsp;{tau}."
    return text


def _who(study: Study) -> str:
    """Models that are compared; where none are, the variants that stand in tables."""
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
    several = len(record.seeds) > 1
    tau = mean_text(record.summary.get("tau"), record.summary.get("tau_se") if several else None)
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


def what_was_run(study: Study, origin: Origin, whole: dict[str, WholeZoo]) -> str:
    """Date and command; for each zoo its facts and how each model was trained."""
    blocks = [
        f'<dl class="facts"><div><dt>Written</dt><dd><time datetime="'
        f'{origin.written:%Y-%m-%dT%H:%MZ}">{quoted(origin.date)}</time></dd></div>'
        f'<div class="wide"><dt>Command</dt><dd><code>{quoted(origin.command)}</code></dd></div>'
        "</dl>"
    ]
    for index, zoo in enumerate(study.zoos):
        facts = _facts(index, zoo, whole.get(zoo.label))
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        blocks.append(f'<h3>{quoted(zoo.label)}</h3><dl class="facts">{items}</dl>')
        protocols = [run for run in zoo.main if run.record.protocol]
        if protocols:
            blocks.append(
                "<details><summary>Protocol of each model</summary>"
                f"{tables.protocol_table(protocols)}</details>"
            )
    return "".join(blocks)


def _facts(index: int, zoo: ZooStudy, whole: WholeZoo | None) -> list[tuple[str, str]]:
    run = zoo.best or (zoo.main or zoo.runs)[0]
    record, chosen = run.record, run.record.selection
    seeds = sorted({str(seed.get("seed")) for run in zoo.runs for seed in run.record.seeds})
    size, kind, key = zoo_size(record.zoo), zoo_seeds(record), f"z{index}.facts"
    read = len({run.record.model for run in zoo.runs})
    parts = " / ".join(count(chosen.get(part)) for part in ("train", "val", "test"))
    seed_list = f"{len(seeds)} ({escape(', '.join(seeds))})"
    return [
        ("Zoo", f"<code>{quoted(str(record.zoo.get('name') or 'unknown'))}</code>"
         if whole is None else f"<code>{quoted(whole.text)}</code>"),
        ("Task", quoted(str(record.zoo.get("task", "unknown")))),
        ("Networks in the zoo", NOTHING if size is None else shown(f"{key}.size", f"{size:,}")),
        ("Their seeds", NOTHING if kind is None else quoted(seeds_text(kind))),
        ("Their checkpoints", quoted_count(record.zoo.get("networks"))),
        ("Architecture", _architecture(record.zoo.get("architecture"))),
        ("Checkpoints read", _checkpoint(chosen.get("percent"))),
        ("Accuracy from", quoted(threshold(chosen.get("min_accuracy")))),
        ("Train / validation / test", shown(f"{key}.parts", parts)),
        ("Seeds of the predictors", shown(f"{key}.seeds", seed_list) if seeds else NOTHING),
        ("Models compared", shown(f"{key}.compared", str(len(zoo.finished)))),
        ("Models with runs", shown(f"{key}.models", str(read))),
        ("Runs read", shown(f"{key}.runs", f"{len(zoo.runs):,}")),
    ]  # fmt: skip


def quoted_count(value: Any) -> str:
    """A count that a record tells."""
    return quoted(f"{value:,}") if isinstance(value, int) else NOTHING


def _architecture(value: Any) -> str:
    """A network of the zoo in words."""
    if not isinstance(value, dict) or not {"blocks", "d_model", "heads"} <= value.keys():
        return NOTHING
    return quoted(f"{value['blocks']} blocks, width {value['d_model']}, {value['heads']} heads")


def _checkpoint(percent: Any) -> str:
    if not isinstance(percent, int | float):
        return "all"
    return quoted(f"at {percent:g} % of training")
