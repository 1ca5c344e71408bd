"""Texts that small models are trained on, as token ids of one small vocabulary."""

from __future__ import annotations

import csv
import gzip
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def python_source() -> str:
    """The modules of the standard library, one after another."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py")))


def english() -> str:
    """The texts that `help()` shows: the language reference, English prose."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def news(folder: Path) -> str:
    """The articles of AG News, title and text of each a line."""
    with gzip.open(folder / "train_partial.csv.gz", "rt", encoding="utf-8") as file:
        return "\n".join(" ".join(row[1:]) for row in csv.reader(file))


def read_tokens(texts: Mapping[str, str], vocabulary: int = 256) -> dict[str, Tensor]:
    """Token ids of each text, in one vocabulary of byte pairs."""
    from tokenizers import Tokenizer, models, trainers

    plain = {name: t.encode("ascii", "replace").decode() for name, t in texts.items()}
    tokenizer = Tokenizer(models.BPE())
    # Pairs are merged within pieces; pieces of a line keep a sentence from being one word.
    pieces = {name: _pieces(text) for name, text in plain.items()}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
    sample = [piece for name in pieces for piece in pieces[name][:60_000]]
    tokenizer.train_from_iterator(sample, trainer)
    different = sorted({piece for words in pieces.values() for piece in words})
    codes = [encoding.ids for encoding in tokenizer.encode_batch_fast(different)]
    ids = dict(zip(different, codes, strict=True))
    return {
        name: torch.tensor([i for piece in words for i in ids[piece]])
        for name, words in pieces.items()
    }


def _pieces(text: str) -> list[str]:
    """Words with the space before them, and everything between words."""
    return re.findall(r" ?\w+|\s+|[^\w\s]", text)


def batches(tokens: Tensor, seed: int, steps: int, rows: int, length: int) -> Tensor:
    """Where the rows of every step start, ``[steps, rows]``; the same seed, the same order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, len(tokens) - length - 1, (steps, rows), generator=generator)
