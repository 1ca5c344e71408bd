"""What is said of predictors that rank networks of other tasks: one ranking, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_nfn.io.files import atomic_file, write_text
from transformer_nfn.paper.table_text import SEEDS_TOGETHER, mean_text

NAME = "transfer"


@dataclass(frozen=True)
class Ranking:
    """How well the predictors of one run rank the networks of one zoo.

    Attributes:
        row: the predictor in words.
        home: the zoo it was trained on, in words.
        zoo: the zoo whose networks are ranked, in words.
        at_home: whether these are the test part of its own zoo.
        networks: how many are ranked.
        tau: Kendall's τ, the mean over seeds; None where the predictor cannot read them.
        error: its standard error; None for one seed.
        together: τ of the mean over the seeds; None for one seed.
        status: ``done``, or why the predictor cannot read these networks.
    """

    row: str
    home: str
    zoo: str
    at_home: bool
    networks: int
    tau: float | None = None
    error: float | None = None
    together: float | None = None
    status: str = "done"


def transfer_markdown(rankings: Sequence[Ranking]) -> str:
    """The table: a row for each predictor, its own zoo's test part first, then the others."""
    lines = ["**Transfer. Kendall’s τ of predictors on networks of other tasks.**", ""]
    zoos = list(dict.fromkeys(r.zoo for r in rankings if not r.at_home))
    for home in dict.fromkeys(r.home for r in rankings):
        part = [r for r in rankings if r.home == home]
        lines += [*_rows(home, part, zoos), ""]
    notes = [f"- {r.row} → {r.zoo}: {r.status}" for r in rankings if r.status != "done"]
    lines += ["- Order alone is judged; accuracies of different tasks are not comparable.", *notes]
    return "\n".join([*lines, ""])


def _rows(home: str, rankings: Sequence[Ranking], zoos: Sequence[str]) -> list[str]:
    counts = {r.zoo: r.networks for r in rankings if not r.at_home}
    tested = {r.networks for r in rankings if r.at_home}
    at_home = f"at home, {min(tested):,} tested" if len(tested) == 1 else "at home"
    columns = [f"{zoo}: {counts[zoo]:,} ranked" for zoo in zoos]
    lines = [
        f"Trained on: {home}.",
        "",
        "| Model | " + " | ".join([at_home, *columns]) + " |",
        "|---|" + "--:|" * (1 + len(columns)),
    ]
    for row in dict.fromkeys(r.row for r in rankings):
        own = [r for r in rankings if r.row == row]
        cells = [next(r for r in own if r.at_home)]
        cells += [next(r for r in own if r.zoo == zoo and not r.at_home) for zoo in zoos]
        texts = [mean_text(r.tau, r.error) if r.status == "done" else "cannot read" for r in cells]
        lines.append("| " + " | ".join([row, *texts]) + " |")
        if any(r.together is not None for r in cells):
            together = [mean_text(r.together, None) for r in cells]
            lines.append("| " + " | ".join([SEEDS_TOGETHER, *together]) + " |")
    return lines


def write_rankings(rankings: Sequence[Ranking], out: Path) -> None:
    """``transfer.md`` and ``transfer.parquet``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_text(out / f"{NAME}.md", transfer_markdown(rankings))
    columns = {name: [getattr(r, name) for r in rankings] for name in Ranking.__annotations__}
    with atomic_file(out / f"{NAME}.parquet") as beside:
        pq.write_table(pa.table(columns), beside)
