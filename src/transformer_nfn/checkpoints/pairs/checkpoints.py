"""Find the checkpoints of a folder: folders and files of weights, and what cannot be read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformer_nfn.checkpoints.families import OpenOptions, open_model
from transformer_nfn.checkpoints.pairs.results import PairsError
from transformer_nfn.errors import TransformerNFNError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx")
MARKS = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that make a folder one checkpoint."""


@dataclass(frozen=True)
class Found:
    """A checkpoint of a folder.

    Attributes:
        name: its path below the folder.
        path: its path.
        identity: changes when its files do.
        family: its architecture, with width and number of blocks: ``gpt2, 768 wide, 12 blocks``.
    """

    name: str
    path: Path
    identity: str
    family: str


def read_folder(
    folder: str | Path, options: OpenOptions | None = None
) -> tuple[list[Found], dict[str, str]]:
    """The checkpoints below a folder by name, and why others cannot be read, a sentence each.

    Args:
        folder: to look in, to any depth; links to folders are not followed.
        options: how all of them are opened.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PairsError(f"'{folder}': no such folder")
    found, not_read = [], {}
    for path in sorted(_candidates(folder)):
        name = str(path.relative_to(folder))
        try:
            with open_model(path, options) as model:
                about = model.about
        except TransformerNFNError as error:
            not_read[name] = str(error)
            continue
        blocks = sum(len(stack.blocks) for stack in about.stacks)
        told = f"{about.family}, {about.width} wide, {blocks} blocks"
        found.append(Found(name, path, _identity(path, options), told))
    if len(found) < 2:
        reason = next((f": {text}" for text in not_read.values()), "")
        raise PairsError(
            f"'{folder}': expected at least two checkpoints that can be read, found {len(found)}"
            f"{reason}"
        )
    return found, not_read


def _candidates(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        path = Path(where)
        if path != folder and any(mark in files for mark in MARKS):
            folders.clear()
            yield path
        else:
            yield from (
                path / name
                for name in files
                if name.endswith(WEIGHTS) and not name.startswith(".")
            )


def _identity(path: Path, options: OpenOptions | None) -> str:
    """Names, lengths and times of a checkpoint's files and how they are read, as a short hash."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    facts = [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
    if options:
        facts.append(str(options))
        if options.architecture is not None:
            facts.append(options.architecture.read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
