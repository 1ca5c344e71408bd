"""The report: one self-contained page about any number of runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from transformer_nfn.io.assets import resolve
from transformer_nfn.io.files import write_text
from transformer_nfn.paper.gather import gather
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.report.opening import Origin
from transformer_nfn.report.page import page
from transformer_nfn.report.whole_zoos import whole_zoos

__all__ = ["write_report"]


def write_report(
    folders: Sequence[Path | str], out: Path | str, *, zoos: Sequence[Path | str] = ()
) -> None:
    """Writes one HTML page about every run in or below the folders.

    The page needs nothing but itself: style, scripts and data stand in it. It appears whole or
    not at all.

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
    write_text(target, page(study, origin, whole_zoos(study, named)))
