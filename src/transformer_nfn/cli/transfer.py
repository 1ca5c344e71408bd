"""`tnfn reproduce transfer`: predictors of one task's networks rank those of another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from transformer_nfn.cli.console import echo_json
from transformer_nfn.cli.experiment_progress import count_one, counting_bar
from transformer_nfn.cli.options import pick_device


def zoo_or_run(given: Path | None) -> Path | None:
    """For an argument: the folder that a path, or the name of a zoo or predictor, stands for."""
    from transformer_nfn.io.assets import NAME, known_assets, resolve

    if given is None or given.exists() or not NAME.fullmatch(str(given)):
        return given
    asset = known_assets().get(str(given))
    return resolve(given, "zoo" if asset is None else asset.kind)


def reproduce_transfer(
    home: Path,
    targets: Sequence[Path],
    out: Path,
    *,
    seeds: int,
    epochs: int | None,
    models: str | None,
    percent: int,
    device: str,
    as_json: bool,
) -> None:
    """Fills the table and shows it; see `transformer_nfn.paper.transfer`."""
    from transformer_nfn.io.assets import resolve
    from transformer_nfn.paper.transfer import LEARNERS, NAME, transfer

    learners = models.split(",") if models else None
    with counting_bar(Console(stderr=True, quiet=as_json)) as bar:
        task = bar.add_task(NAME, total=len(learners or LEARNERS), note="")

        def progress(words: str, line: dict[str, Any]) -> None:
            taus = [
                r.status if r.tau is None else f"τ {r.tau:.3f}" for r in line.get("rankings", [])
            ]
            count_one(bar, task, words, line, ", ".join(taus) or None)

        found = transfer(
            home,
            [resolve(path, "zoo") for path in targets],
            out,
            seeds=list(range(seeds)),
            epochs=epochs,
            learners=learners,
            percent=percent,
            device=pick_device(device),
            progress=progress,
        )
    if as_json:
        echo_json([asdict(ranking) for ranking in found])
        return
    Console().print(Markdown((out / f"{NAME}.md").read_text()))
    typer.echo(f"wrote {out}/{NAME}.md and {out}/{NAME}.parquet")
