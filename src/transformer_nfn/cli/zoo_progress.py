"""A build's progress in the terminal: runs, networks × epochs a second, time left, crashes."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class BuildBar:
    """Draws a bar while entered; a `zoo.training.progress.Progress`."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.fields[runs]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("network-epochs {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("build", total=None, runs="starting", speed="")
        self._runs = self._done = self._crashed = self._work = 0
        self._since = time.perf_counter()

    def __enter__(self) -> BuildBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """``runs`` there are, ``done`` of them already; ``work`` network-epochs are left."""
        self._runs, self._done = runs, done
        self._since = time.perf_counter()
        self._bar.update(self._task, total=work)
        if done:
            note = f"{done} of {runs} runs are there already; {note}"
        self._bar.console.print(note, highlight=False)
        self._show()

    def trained(self, network_epochs: int) -> None:
        """So many networks did one more epoch each."""
        self._work += network_epochs
        self._bar.update(self._task, advance=network_epochs)
        self._show()

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard is on disk."""
        self._done += runs
        self._crashed += crashed
        self._show()

    def note(self, text: str) -> None:
        """Something a user should know."""
        self._bar.console.print(text, highlight=False)

    def _show(self) -> None:
        speed = self._work / max(time.perf_counter() - self._since, 1e-9)
        self._bar.update(
            self._task,
            runs=f"{self._done}/{self._runs} runs, {self._crashed} crashed",
            speed=f"{speed:.1f}/s",
        )
