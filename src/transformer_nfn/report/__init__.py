"""The report: one self-contained page about any number of runs."""

from __future__ import annotations

from pathlib import Path

from transformer_nfn.files.whole import write_text
from transformer_nfn.paper.gather import gather
from transformer_nfn.prediction.records import RunError
from transformer_nfn.report.page import page

__all__ = ["write_report"]


def write_report(folders: list[Path], out: Path) -> None:
    """Writes one HTML page about every run in or below the folders.

    The page needs nothing but itself: style, scripts and data stand in it. It appears whole or
    not at all.
    """
    if not folders:
        raise RunError("a report needs at least one folder with runs")
    study = gather([Path(folder) for folder in folders])
    target = Path(out)
    if target.is_dir():
        raise RunError(f"'{target}' is a folder, not a file to write a report to")
    write_text(target, page(study))
