"""How does C source become code this process can call? Compiled once, kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.downloads import cache_folder
from transformer_nfn.io.files import atomic_file

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
    target = cache_folder("compiled") / f"{what}-{digest}.so"
    if target.exists():
        return target, ""
    problem = _compile(compiler, sources, target, what, flags)
    return (None, problem) if problem else (target, "")


def _cpu() -> str:
    # A cache may be shared by machines with different instructions.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.version()
    return next((x for x in lines if x.lower().startswith(("flags", "features"))), "")


def _compile(
    compiler: str, sources: Sequence[Path], target: Path, what: str, flags: Sequence[str]
) -> str:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    folders = [f"-I{folder}" for folder in dict.fromkeys(source.parent for source in sources)]
    command = [compiler, *FLAGS, native, *flags, *folders, "-shared", "-fPIC"]
    command += [str(sources[0]), "-o"]
    try:
        # Several workers may start at once; the last to finish wins.
        with atomic_file(target) as beside:
            _run([*command, str(beside), "-lm"], what)
    except TransformerNFNError as error:
        return str(error)
    return ""


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransformerNFNError(f"the {what} could not be compiled ({error})") from error
    if done.returncode:
        reason = done.stderr.strip()[:120]
        raise TransformerNFNError(f"'{command[0]}' could not compile the {what} ({reason})")
