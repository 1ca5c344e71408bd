"""C source compiled on demand, kept in the user's cache and loaded with ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.downloads import cache_folder
from transformer_nfn.io.files import write_bytes
from transformer_nfn.known_tasks import BLOCKS, HEADS, HIDDEN, WIDTH

HEADERS = ("block.h", "layers.h", "vectors.h")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
NETWORK_FLAGS = ("-fno-schedule-insns",)
"""GCC would load so much ahead of the products that registers run out."""


@dataclass(frozen=True)
class CompiledSizes:
    """Sizes of a network that are constants of the C code."""

    width: int = WIDTH
    heads: int = HEADS
    neurons: int = HIDDEN
    blocks: int = BLOCKS
    classes: int = 16

    @property
    def flags(self) -> list[str]:
        """Compiler flags; classes are padded, so that several tasks share one library."""
        constants = {
            "WIDTH": self.width,
            "HEADS": self.heads,
            "NEURONS": self.neurons,
            "BLOCKS": self.blocks,
            "LOGITS": -(-self.classes // 16) * 16,
        }
        return [f"-DTNFN_{name}={size}" for name, size in constants.items()]


def load_for(
    sizes: CompiledSizes,
    sources: Sequence[Path],
    what: str,
    declare: Callable[[ctypes.CDLL], ctypes.CDLL],
    tries: Sequence[Sequence[str]] = ((),),
) -> tuple[ctypes.CDLL | None, str]:
    """As `load`, for networks of one size; sources may include `HEADERS`."""
    headers = [Path(__file__).parent / "native_network" / name for name in HEADERS]
    flags = [[*sizes.flags, *NETWORK_FLAGS, *more] for more in tries]
    return load([*sources, *headers], what, declare, flags)


def find_compiler() -> str | None:
    """The C compiler, from ``CC`` or by its common names."""
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
    """Compile and load C source; returns the library, or None and the reason.

    Args:
        sources, what: see `build`.
        declare: sets the argument types of the library's functions, and returns it.
        tries: further compiler flags; the first that work are used.
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
    """Compile C source to a shared library; returns its path, or None and the reason.

    Args:
        compiler: path from `find_compiler`.
        sources: the file to compile, then those it includes.
        what: name of the library, in its file name and in messages.
        flags: compiler flags besides the common ones.
    """
    text = b"".join(source.read_bytes() for source in sources) + " ".join(flags).encode()
    machine = f"{platform.machine()} {platform.processor()} {_cpu()} {compiler}"
    name = f"{what}-{_digest(text + machine.encode())}"
    folder = cache_folder("compiled")
    try:
        # A name ends in a checksum: loading a library that was cut short would kill the process.
        for made in folder.glob(f"{name}-*.so"):
            if made.name == f"{name}-{_digest(made.read_bytes())}.so":
                return made, ""
            made.unlink(missing_ok=True)
        data = _compile(compiler, sources, what, flags)
        write_bytes(made := folder / f"{name}-{_digest(data)}.so", data)
    except (OSError, TransformerNFNError) as error:
        return None, str(error)
    return made, ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _cpu() -> str:
    # A cache may be shared by machines with different instructions.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.version()
    return next((x for x in lines if x.lower().startswith(("flags", "features"))), "")


def _compile(
    compiler: str, sources: Sequence[Path], what: str, flags: Sequence[str]
) -> bytes:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    folders = [f"-I{folder}" for folder in dict.fromkeys(source.parent for source in sources)]
    command = [compiler, *FLAGS, native, *flags, *folders, "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / f"{what}.so"
        _run([*command, str(sources[0]), "-o", str(made), "-lm"], what)
        return made.read_bytes()


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransformerNFNError(f"the {what} could not be compiled ({error})") from error
    if done.returncode:
        reason = done.stderr.strip()[:120]
        raise TransformerNFNError(f"'{command[0]}' could not compile the {what} ({reason})")
