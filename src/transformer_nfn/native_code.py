"""How does C source become code this process can call? Compiled once, kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")


def find_compiler() -> str | None:
    """The C compiler, from ``CC`` or by its usual names."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def load(
    sources: Sequence[Path],
    what: str,
    declare: Callable[[ctypes.CDLL], ctypes.CDLL],
    tries: Sequence[Sequence[str]] = ((),),
) -> tuple[ctypes.CDLL | None, str]:
    """The library made of some C source, ready to call, or None and why there is none.

    Args:
        sources, what: see `build`.
        declare: says what the library's functions take, and returns it.
        tries: further flags for the compiler; the first with which it works are taken.
    """
    compiler = find_compiler()
    if compiler is None:
        return None, "no C compiler was found"
    problem = ""
    for flags in tries:
        made, problem = build(compiler, sources, what, flags)
        if made is None:
            continue
        try:
            return declare(ctypes.CDLL(str(made))), ""
        except OSError as error:
            problem = f"the compiled {what} cannot be loaded ({error})"
    return None, problem


def build(
    compiler: str, sources: Sequence[Path], what: str, flags: Sequence[str] = ()
) -> tuple[Path | None, str]:
    """The shared library made of some C source, or None and why there is none.

    Args:
        compiler: what `find_compiler` found.
        sources: the file to compile, then those it includes.
        what: what the library is called, in its file's name and where something is wrong.
        flags: for the compiler, besides the usual ones.
    """
    text = b"".join(source.read_bytes() for source in sources) + " ".join(flags).encode()
    machine = f"{platform.machine()} {platform.processor()} {_cpu()} {compiler}"
    digest = hashlib.sha256(text + machine.encode()).hexdigest()[:16]
    target = _cache() / f"{what}-{digest}.so"
    if target.exists():
        return target, ""
    problem = _compile(compiler, sources[0], target, what, flags)
    return (None, problem) if problem else (target, "")


def _cpu() -> str:
    # A cache may be shared by machines with different instructions.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.version()
    return next((x for x in lines if x.lower().startswith(("flags", "features"))), "")


def _cache() -> Path:
    root = os.environ.get("TNFN_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "transformer-nfn"


def _compile(
    compiler: str, source: Path, target: Path, what: str, flags: Sequence[str]
) -> str:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            # Built beside and renamed, because several workers may start at once.
            made = Path(scratch) / f"{what}.so"
            options = [*FLAGS, native, *flags, "-shared", "-fPIC"]
            command = [compiler, *options, str(source), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                return f"'{compiler}' could not compile the {what} ({done.stderr.strip()[:120]})"
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the {what} could not be compiled ({error})"
    return ""
