"""Runs a range of damaged inputs, each in a child of its own that has everything imported.

A child is forked from this process, which imports the commands once and never starts a thread; so
an input costs no interpreter start, an abort ends one child, and a hang is ended from here.
"""

import fcntl
import functools
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE), str(HERE.parent), str(HERE.parent / "prediction"),
    str(HERE.parent / "checkpoints" / "families"),
]  # fmt: skip
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # Arrow's allocator would start one

import torch  # noqa: E402
from expected import Outcome, Right  # noqa: E402

torch.set_num_threads(1)
torch.set_num_interop_threads(1)

LIMIT = 10.0
"""Seconds of a processor after which a command counts as hanging; of the clock, ``PATIENCE``
times as many, because this machine may have other work."""
PATIENCE = 4
MEMORY = 4 << 30
"""Bytes that a command may ask for."""
CHANGES = {
    "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1, "os.truncate": 0,
    "os.chmod": 0, "shutil.rmtree": 0,
}  # fmt: skip
"""Events of Python's audit that change files, and which argument is the path."""
NO_STREAMS: Mapping[int, str] = {}
CACHES = ("TNFN_CACHE", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR")
"""Folders that commands may fill."""


def in_child(
    run: Callable[[], int], folder: Path, limit: float, streams: Mapping[int, str] = NO_STREAMS
) -> Outcome:
    """Runs something in a forked child, in ``folder``, and says how it ended.

    Args:
        streams: see `drawn_damage.streams`.
    """
    logs = {name: folder.with_name(f"{folder.name}.{name}") for name in ("out", "err", "writes")}
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            for target, name in ((1, "out"), (2, "err")):
                handle = os.open(logs[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, target)
            for number, how in streams.items():
                _spoil(number, how)
            sys.stdin = sys.__stdin__ = _stream(0, "r")
            sys.stdout = sys.__stdout__ = _stream(1, "w")
            sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace")
            os.chdir(folder)
            code = run()
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                try:
                    stream.flush()
                except OSError:
                    code = 120  # as Python ends then
            os._exit(code)
    status = _wait(child, limit)
    seconds = time.perf_counter() - start
    texts = {
        name: log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        for name, log in logs.items()
    }
    for log in logs.values():
        log.unlink(missing_ok=True)
    writes = sorted(set(texts["writes"].splitlines()))
    return Outcome(status, texts["out"], texts["err"], seconds, writes)


def _spoil(number: int, how: str) -> None:
    """Close a standard stream, make it full, or let its reader go."""
    if how == "closed":
        os.close(number)
    elif how == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    else:
        ends = os.pipe()
        os.dup2(ends[number > 0], number)
        os.close(ends[0])
        os.close(ends[1])


def _stream(number: int, mode: str, errors: str = "strict") -> Any:
    """A standard stream as Python opens it; None if it is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    return os.fdopen(number, mode, encoding="utf-8", errors=errors)


def _wait(child: int, limit: float) -> int | None:
    ended = os.pidfd_open(child)
    last = time.monotonic() + PATIENCE * limit
    try:
        while not select.select([ended], [], [], 0.5)[0]:
            if hung := time.monotonic() > last or _processor_seconds(child) > limit:
                break
        else:
            hung = False
    finally:
        os.close(ended)
    if hung:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if hung else os.waitstatus_to_exitcode(status)


def _processor_seconds(child: int) -> float:
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(words: tuple[str, ...], folder: Path) -> Callable[[], int]:
    """``tnfn`` with these words, its memory limited and its writes watched."""

    def run() -> int:
        from transformer_nfn.cli import main

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["TMPDIR"] = str(folder)
        _watch(folder)
        sys.argv = ["tnfn", *words]
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


def _watch(folder: Path) -> None:
    """Notes every path outside the folder that is written to, made, renamed or removed."""
    note = os.open(folder.with_name(f"{folder.name}.writes"), os.O_WRONLY | os.O_CREAT)
    note = fcntl.fcntl(note, fcntl.F_DUPFD, 100)  # not the number of a stream that is closed
    home = os.path.realpath(folder)
    caches = [os.environ[name] for name in CACHES if name in os.environ]
    # Nothing can be made below /proc and /dev; where a user asks for that, it is tried.
    allowed = (home + os.sep, "/proc", "/dev/", *map(os.path.realpath, caches))

    def changed(path: object) -> None:
        if isinstance(path, int) or path is None:
            return
        real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if real != home and not real.startswith(allowed):
            os.write(note, f"{real}\n".encode(errors="replace"))

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if written:
                changed(path)
        elif event == "os.rename":
            changed(arguments[0])
            changed(arguments[1])
        elif event in CHANGES:
            changed(arguments[CHANGES[event]])
        elif event in ("os.system", "os.exec"):
            os.write(note, f"{event} {arguments[0]!r}\n".encode(errors="replace"))

    sys.addaudithook(watch)


def _warm_up(valid: Path) -> None:
    """Runs some commands here, so that what they import and build is there in every child."""
    import typer.main

    from tnfn_command import tnfn

    typer.main.get_command = functools.cache(typer.main.get_command)
    for words in (
        ("architectures",), ("predict", valid / "runs" / "statnn", valid / "zoo#0"),
        ("compare", valid / "ours.safetensors", valid / "other.safetensors"),
        ("inspect", valid / "hub", "--json"), ("zoo", "info", valid / "zoo"), ("compare", "--x"),
    ):  # fmt: skip
        done = tnfn(*words)
        assert done.returncode == (2 if "--x" in words else 0), done
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise SystemExit(f"{threads} threads: a child that is forked now could wait for ever")
    gc.collect()
    gc.freeze()


def run_range(root: Path, seed: int, numbers: range, limit: float = LIMIT) -> None:
    """Runs the inputs with these numbers and prints a line of JSON for each."""
    import import_everything  # noqa: F401
    import valid_inputs
    from expected import fault

    from cases import SCENARIOS, make

    valid = root / "valid"
    valid.mkdir(parents=True)
    made = in_child(lambda: valid_inputs.build(valid) or 0, valid, 600)
    if made.status != 0:
        raise SystemExit(f"the valid inputs could not be made: {made}")
    _warm_up(valid)
    undamaged: dict[str, tuple[tuple[str, ...], Outcome]] = {}
    for number in numbers:
        scenario = SCENARIOS[number % len(SCENARIOS)]
        folder = root / f"case-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        case = make(scenario, seed, number, valid, folder)
        words = case.whole or case.words
        key = f"{scenario.name} {words}"
        if case.damage.right.name.startswith(("EQUAL", "ACC")) and key not in undamaged:
            whole = root / f"whole-{number}"
            scenario.copy(valid, whole)
            undamaged[key] = words, in_child(command(words, whole), whole, limit)
            shutil.rmtree(whole, ignore_errors=True)
        there = set(folder.rglob("*"))
        outcome = in_child(command(case.words, folder), folder, limit, case.streams)
        left = sorted(set(folder.rglob("*")) - there)
        outcome.left = [str(path.relative_to(folder)) for path in left]
        outcome.records = [
            path.read_text(errors="replace") for path in left
            # A config of others may hold infinity, and is copied.
            if path.suffix == ".json" and path.is_file() and not path.name.endswith("config.json")
        ]  # fmt: skip
        before = undamaged.get(key, (case.words, outcome))[1]
        wrong = fault(case, outcome, before)
        if case.damage.right is Right.EQUAL and before.status not in case.answers:
            wrong = f"the undamaged input ends with {before.status}: {before.stderr}"
        line = {
            "number": number, "scenario": scenario.name, "words": case.words,
            "damage": case.damage.what, "streams": case.streams,
            "right": case.damage.right.name, "fault": wrong,
            "status": outcome.status, "seconds": round(outcome.seconds, 2),
            "stderr": outcome.stderr[-2000:], "stdout": outcome.stdout[-300:],
            "writes": outcome.writes, "left": outcome.left,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    place, seed, first, last = sys.argv[1:]
    run_range(Path(place), int(seed), range(int(first), int(last)))
