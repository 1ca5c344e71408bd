"""What do the small models read? Two kinds of text that every Python installation has."""

from __future__ import annotations

import pydoc_data.topics
import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256


def python_source() -> str:
    """The modules of the standard library, one after another."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py")))


def english() -> str:
    """The texts that `help()` shows: the language reference, English prose."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def read_tokens() -> dict[str, Tensor]:
    """Both texts as token ids of one vocabulary of byte pairs; ``python`` and ``english``."""
    from tokenizers import Tokenizer, models, trainers

    texts = {"python": python_source(), "english": english()}
    plain = {name: t.encode("ascii", "replace").decode() for name, t in texts.items()}
    tokenizer = Tokenizer(models.BPE())
    # Pairs are merged within pieces; pieces of a line keep a sentence from being one word.
    pieces = {name: _pieces(text) for name, text in plain.items()}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    sample = [piece for name in pieces for piece in pieces[name][:60_000]]
    tokenizer.train_from_iterator(sample, trainer)
    return {
        name: torch.tensor([i for e in tokenizer.encode_batch_fast(words) for i in e.ids])
        for name, words in pieces.items()
    }


def _pieces(text: str) -> list[str]:
    """Words with the space before them, and everything between words."""
    return re.findall(r" ?\w+|\s+|[^\w\s]", text)


def batches(tokens: Tensor, seed: int, steps: int, rows: int, length: int) -> Tensor:
    """Where the rows of every step start, ``[steps, rows]``; the same seed, the same order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, len(tokens) - length - 1, (steps, rows), generator=generator)
