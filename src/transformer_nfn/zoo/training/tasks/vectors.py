"""Where word vectors come from: a word2vec file reduced by PCA, or the task's own text."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import missing_extra
from transformer_nfn.zoo.errors import DataError
from transformer_nfn.zoo.word_vectors import WordVectors


def train_vectors(texts: Sequence[Sequence[str]], width: int) -> WordVectors:
    """CBOW vectors of the task's own training text; one thread, so that they repeat."""
    try:
        from gensim.models import Word2Vec
    except ImportError as error:
        raise missing_extra(
            DataError,
            "gensim",
            "zoo",
            "training word vectors (or name a word2vec file with --vectors)",
        ) from error
    model = Word2Vec(
        [list(text) for text in texts],
        vector_size=width,
        min_count=min(5, 1 + len(texts) // 2000),
        sg=0,
        workers=1,
        seed=1,
        epochs=5,
    )
    words: Any = model.wv
    return WordVectors(
        tuple(words.index_to_key), torch.from_numpy(words.vectors.copy()), "cbow on training text"
    )


def load_vectors(path: Path, used: set[str], width: int) -> WordVectors:
    """Vectors of the words in ``used``, reduced to ``width`` by PCA over those words."""
    vocabulary: list[str] = []
    rows: list[np.ndarray] = []
    for word, vector in read_word2vec(path):
        if word in used:
            vocabulary.append(word)
            rows.append(vector)
    if not rows:
        raise DataError(f"{path}: holds none of the {len(used)} words of the task")
    matrix = torch.from_numpy(np.stack(rows))
    return WordVectors(tuple(vocabulary), _reduce(matrix, width, path), path.name)


def _reduce(matrix: Tensor, width: int, path: Path) -> Tensor:
    if matrix.shape[1] < width:
        raise DataError(f"{path}: vectors of width {matrix.shape[1]}, at least {width} needed")
    if matrix.shape[1] == width:
        return matrix
    centred = (matrix - matrix.mean(0)).double()
    _, axes = torch.linalg.eigh(centred.T @ centred)
    axes = axes.flip(1)[:, :width]
    # An eigenvector's sign is arbitrary; fix it so that the result repeats everywhere.
    largest = axes.abs().argmax(0)
    axes = axes * axes[largest, torch.arange(width)].sign()
    out: Tensor = (centred @ axes).float()
    return out


def read_word2vec(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every word and vector of a word2vec file, text or binary, gzipped or not."""
    try:
        with _open(path) as file:
            header = file.readline().split()
            if len(header) != 2 or not all(part.isdigit() for part in header):
                raise DataError(f"{path}: not a word2vec file (no line of count and width first)")
            count, width = int(header[0]), int(header[1])
            yield from _rows(file, count, width, path)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: not readable ({error})") from error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _rows(
    file: BinaryIO, count: int, width: int, path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    where = file.tell()
    first = file.readline()
    file.seek(where)
    if _is_text(first, width):
        for line in file:
            *_, tail = parts = line.decode("utf-8", "replace").rstrip().rsplit(" ", width)
            if len(parts) != width + 1:
                raise DataError(f"{path}: a row of {width} numbers expected, found '{tail[:40]}'")
            yield parts[0], np.array(parts[1:], dtype=np.float32)
        return
    for _ in range(count):
        word = bytearray()
        while (letter := file.read(1)) != b" ":
            if not letter:
                raise DataError(f"{path}: ends before its {count} words")
            word += letter
        body = file.read(4 * width)
        if len(body) != 4 * width:
            raise DataError(f"{path}: ends inside a vector")
        yield word.decode("utf-8", "replace").strip(), np.frombuffer(body, dtype="<f4").copy()


def _is_text(line: bytes, width: int) -> bool:
    parts = line.rstrip().rsplit(b" ", width)
    try:
        return len(parts) == width + 1 and all(np.isfinite(float(part)) for part in parts[1:])
    except ValueError:
        return False
