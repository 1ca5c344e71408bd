"""The text task AG News, and its frozen word vectors."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import needs_extra
from transformer_nfn.io.downloads import RemoteFile, fetch
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo.errors import DataError
from transformer_nfn.zoo.sizes import PAPER, NetworkSizes, SizeGroup
from transformer_nfn.zoo.store.folder import WordVectors
from transformer_nfn.zoo.training.tasks.task import Batch, Split, Task, hold_out


def train_vectors(texts: Sequence[Sequence[str]], width: int) -> WordVectors:
    """Train CBOW vectors on the task's text; single-threaded, so that they are reproducible."""
    purpose = "training word vectors (or name a word2vec file with --vectors)"
    with needs_extra(DataError, "gensim", "zoo", purpose):
        from gensim.models import Word2Vec
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
    """Load the vectors of the words in ``used``, reduced to ``width`` by PCA over those words."""
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
    # An eigenvector's sign is arbitrary; fix it, so that the result is reproducible.
    largest = axes.abs().argmax(0)
    axes = axes * axes[largest, torch.arange(width)].sign()
    out: Tensor = (centred @ axes).float()
    return out


def read_word2vec(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over the words and vectors of a word2vec file, text or binary, gzipped or not."""
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


_BASE = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_FILES = {
    "train": RemoteFile(_BASE + "train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
    "test": RemoteFile(_BASE + "test.csv", "d52ea96a97a2d943681189a97654912d"),
}
AG_NEWS = KNOWN_TASKS["ag_news"]


@dataclass(frozen=True)
class TextTask(Task):
    """Texts as word numbers; 0 (the zero vector) stands for unknown words and padding.

    Attributes:
        tokens: ``int32 [samples, longest]`` per split, padded with 0.
        counts: ``int64 [samples]`` per split, words in each sample.
        vectors: ``[words + 1, d_model]``.
    """

    name: str
    sizes: NetworkSizes
    tokens: dict[Split, Tensor]
    counts: dict[Split, Tensor]
    labels: dict[Split, Tensor]
    words: WordVectors
    vectors: Tensor
    epochs: int
    provenance: dict[str, Any]
    batch_size: int = 128
    random_subset: ClassVar[bool] = False

    def batch(self, split: Split, index: Tensor, crop: Tensor | None = None) -> Batch:
        """Word vectors ``[networks, batch, tokens, d_model]``; see `Task.batch`.

        Each network's batch is padded to its longest text, as if it were alone.
        """
        lengths = self.counts[split][index].amax(1).clamp(min=1)
        longest = int(lengths.max())
        if index.is_cuda:  # few different shapes, because compiled steps depend on them
            longest = min(-(-longest // 32) * 32, self.tokens[split].shape[1])
        tokens = self.tokens[split][index][:, :, :longest]
        return Batch(self.vectors[tokens.long()], self.labels[split][index], lengths)

    def module_inputs(self, inputs: Tensor) -> Tensor:
        """The word vectors as they are; see `Task.module_inputs`."""
        return inputs


def ag_news(
    folder: Path | None,
    held: float | None,
    samples: int | None,
    vectors: Path | WordVectors | None,
    group: SizeGroup = PAPER,
) -> TextTask:
    """AG News; ``vectors`` is a word2vec file, word vectors, or None to train them.

    Word vectors are as wide as the networks, whose first block reads them directly.
    """
    paths = {part: _find(part, folder) for part in ("train", "test")}
    texts = {part: read_ag_news(path) for part, path in paths.items()}
    held = 0.05 if held is None else held
    keep, out = hold_out(len(texts["train"][0]), held, samples)
    known = [texts["train"][1][i] for i in keep.tolist()]
    if isinstance(vectors, WordVectors):
        words = vectors
    elif vectors is not None:
        used = {word for line in known + texts["test"][1] for word in line}
        words = load_vectors(vectors, used, group.width)
    else:
        words = train_vectors(known, group.width)
    if words.vectors.shape[1] != group.width:
        raise DataError(
            f"word vectors of width {group.width} expected, found {words.vectors.shape[1]}"
        )
    number = {word: i + 1 for i, word in enumerate(words.vocabulary)}
    train, test = (_numbers(texts[part][1], number) for part in ("train", "test"))
    train_y, test_y = (torch.tensor(texts[part][0]) for part in ("train", "test"))
    zero = torch.zeros(1, words.vectors.shape[1])
    return TextTask(
        AG_NEWS.name,
        NetworkSizes.of(AG_NEWS, group),
        tokens={"train": train[0][keep], "held": train[0][out], "test": test[0]},
        counts={"train": train[1][keep], "held": train[1][out], "test": test[1]},
        labels={"train": train_y[keep], "held": train_y[out], "test": test_y},
        words=words,
        vectors=torch.cat([zero, words.vectors]),
        epochs=100,
        provenance={paths[part].name: texts[part][2] for part in paths}
        | {"vectors": words.source},
    )


def _numbers(texts: list[list[str]], number: dict[str, int]) -> tuple[Tensor, Tensor]:
    most = AG_NEWS.tokens
    counts = torch.tensor([min(len(text), most) for text in texts])
    tokens = torch.zeros(len(texts), int(counts.max()), dtype=torch.int32)
    for row, text in enumerate(texts):
        ids = [number.get(word, 0) for word in text[:most]]
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return tokens, counts


def _find(part: str, folder: Path | None) -> Path:
    if folder is None:
        return fetch(AG_NEWS.name, _FILES[part], None)
    if not folder.is_dir():
        raise DataError(f"data folder '{folder}' does not exist")
    for name in (part, f"{part}_partial"):
        for suffix in (".csv", ".csv.gz"):
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    raise DataError(f"{folder}: missing {part}.csv or {part}.csv.gz (task 'ag_news' needs it)")


def read_ag_news(path: Path) -> tuple[list[int], list[list[str]], str]:
    """Labels from 0, texts as words (case kept), and the md5 sum; a header row is skipped."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        text = raw.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable csv file ({error})") from error
    labels: list[int] = []
    texts: list[list[str]] = []
    for line, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
        if len(row) != 3:
            raise DataError(f"{path} row {line}: expected 3 columns, found {len(row)}")
        if line == 1 and not row[0].strip().isdigit():
            continue
        last = AG_NEWS.classes
        if not row[0].strip().isdigit() or not 1 <= int(row[0]) <= last:
            raise DataError(f"{path} row {line}: label must be 1 to {last}, found '{row[0]}'")
        labels.append(int(row[0]) - 1)
        texts.append(row[2].split())
    if not labels:
        raise DataError(f"{path}: holds no rows")
    return labels, texts, hashlib.md5(raw, usedforsecurity=False).hexdigest()
