"""The C step on this machine: compiled once by the system's compiler, kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("step.c", "pass.h")


def find_compiler() -> str | None:
    """The C compiler, from ``CC`` or by its usual names."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled step, or None and why there is none."""
    compiler = find_compiler()
    if compiler is None:
        return None, "no C compiler was found"
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in SOURCES)
    machine = f"{platform.machine()} {platform.processor()} {_cpu()} {compiler}"
    digest = hashlib.sha256(text + machine.encode()).hexdigest()[:16]
    target = _cache() / f"step-{digest}.so"
    if not target.exists():
        problem = _compile(compiler, here / SOURCES[0], target)
        if problem:
            return None, problem
    try:
        return _declare(ctypes.CDLL(str(target))), ""
    except OSError as error:
        return None, f"the compiled step cannot be loaded ({error})"


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


def _compile(compiler: str, source: Path, target: Path) -> str:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = ["-O3", native, "-std=gnu11", "-ffp-contract=fast"]
    flags += ["-fno-math-errno", "-fno-trapping-math"]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            # Built beside and renamed, because several workers may start at once.
            made = Path(scratch) / "step.so"
            command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                return f"'{compiler}' could not compile the step ({done.stderr.strip()[:120]})"
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the step could not be compiled ({error})"
    return ""


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    i, long, pointer = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
    lib.tnfn_pass.argtypes = [
        i, i, i, i, i, pointer, pointer, pointer, pointer, i, pointer,
        pointer, i, pointer, pointer, pointer, pointer, pointer,
    ]
    lib.tnfn_pass.restype = i
    lib.tnfn_update.argtypes = [i, long, pointer, pointer, pointer, pointer, pointer]
    lib.tnfn_update.restype = None
    return lib
