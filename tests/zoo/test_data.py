"""Data files: read as published, rejected if invalid."""

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tnfn_command import assert_refused, printed
from transformer_nfn.io.assets import CHECKOUT
from transformer_nfn.zoo import (
    BuildOptions,
    DataError,
    Recipe,
    Zoo,
    ZooError,
    build,
    load_task,
    train,
)
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.tasks import TextTask, images
from transformer_nfn.zoo.training.tasks.text import load_vectors, read_ag_news, read_word2vec
from transformer_nfn.zoo.verify import verify

from .conftest import DATA, write_news

needs_mnist = pytest.mark.skipif(
    not (DATA / "mnist").is_dir(), reason="the MNIST files are not on this machine"
)
needs_news = pytest.mark.skipif(
    not (DATA / "ag_news").is_dir(), reason="the AG News files are not on this machine"
)


def test_digits_need_no_files_and_no_network() -> None:
    task = load_task("digits")
    assert sum(task.num_samples.values()) == 1797
    assert task.sizes.tokens == 16
    assert task.sizes.patch == 4


def test_held_out_samples_are_never_trained_on() -> None:
    task = load_task("digits")
    everything = torch.cat([task.images[s] for s in ("train", "held", "test")])
    assert len(everything) == 1797
    unsplit = load_task("digits", held=0.0)
    assert unsplit.num_samples["held"] == 0
    assert unsplit.num_samples["train"] == task.num_samples["train"] + task.num_samples["held"]
    assert torch.equal(unsplit.images["test"], task.images["test"])


@needs_mnist
def test_mnist_is_read_from_its_idx_files() -> None:
    task = load_task("mnist", DATA / "mnist")
    assert task.num_samples == {"train": 55_000, "held": 5_000, "test": 10_000}
    assert task.labels["test"][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    batch = task.batch("test", torch.tensor([[0]]))
    assert batch.inputs.shape == (1, 1, 49, 16)
    assert batch.inputs.min() == -1.0
    assert batch.inputs.max() == 1.0


@needs_mnist
def test_a_corrupt_mnist_file_is_reported(tmp_path: Path) -> None:
    for path in (DATA / "mnist").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bad = tmp_path / "t10k-labels-idx1-ubyte.gz"
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"t10k-labels.*corrupt, expected md5 ec29112d"):
        build(tmp_path / "zoo", BuildOptions("mnist", runs=1, data=tmp_path))
    assert not (tmp_path / "zoo").exists()
    bad.unlink()
    with pytest.raises(DataError, match=r"t10k-labels.*missing"):
        load_task("mnist", tmp_path)


@needs_mnist
@pytest.mark.nightly
def test_good_configurations_learn_mnist() -> None:
    task = load_task("mnist", DATA / "mnist")
    good = [Config("good", "adam", 3e-3, 1e-7, 0.3, 0.0, 1.0, 2)]
    rows = train(task, good, Recipe(6)).rows
    assert max(r["test_accuracy"] for r in rows) > 0.9


@needs_news
@pytest.mark.nightly
def test_good_configurations_learn_ag_news() -> None:
    task = load_task("ag_news", DATA / "ag_news", samples=24_000)
    good = [Config(f"{i}", "adam", 3e-3, 1e-7, 0.2, 0.0, 1.0, i) for i in range(2)]
    rows = train(task, good, Recipe(3)).rows
    assert max(r["test_accuracy"] for r in rows) > 0.8


@needs_news
def test_ag_news_is_read_as_published() -> None:
    labels, texts, md5 = read_ag_news(DATA / "ag_news" / "test.csv.gz")
    assert len(labels) == 7_600
    assert md5 == "d52ea96a97a2d943681189a97654912d"
    assert set(labels) == {0, 1, 2, 3}
    assert texts[0][:3] == ["Unions", "representing", "workers"]


def test_news_with_and_without_header_and_gzip(tmp_path: Path) -> None:
    assert len(read_ag_news(write_news(tmp_path, header=True) / "train.csv")[0]) == 300
    packed = tmp_path / "train.csv.gz"
    packed.write_bytes(gzip.compress((write_news(tmp_path) / "train.csv").read_bytes()))
    assert len(read_ag_news(packed)[0]) == 300


def test_invalid_missing_and_damaged_news_are_reported_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    for row, words in (
        ('"1","only two"', r"row 301: expected 3 columns, found 2"),
        ('"5","t","d"', r"row 301: label must be 1 to 4, found '5'"),
        ('"x","t","d"', r"row 301: label must be 1 to 4, found 'x'"),
    ):
        folder = write_news(tmp_path / "data")
        with (folder / "train.csv").open("a") as file:
            file.write(row + "\n")
        with pytest.raises(DataError, match=words):
            build(tmp_path / "zoo", BuildOptions("ag_news", runs=1, data=folder))
        assert not (tmp_path / "zoo").exists()
    (write_news(folder) / "test.csv").unlink()
    with pytest.raises(DataError, match=r"missing test\.csv"):
        load_task("ag_news", folder)
    (folder / "test.csv.gz").write_bytes(gzip.compress(b"x" * 1000)[:-20])
    with pytest.raises(DataError, match=r"test\.csv\.gz: not a readable csv"):
        load_task("ag_news", folder)


def test_batches_of_text_are_padded_as_if_alone(news: TextTask) -> None:
    index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    batch = news.batch("train", index)
    assert batch.lengths is not None
    for m in range(2):
        alone = news.batch("train", index[m : m + 1])
        longest = int(news.counts["train"][index[m]].max())
        assert alone.inputs.shape[2] == longest == int(batch.lengths[m])
        assert torch.equal(alone.inputs[0], batch.inputs[m, :, :longest])
    assert (news.vectors[0] == 0).all()


def test_a_text_zoo_keeps_its_word_vectors_and_another_may_take_them(tmp_path: Path) -> None:
    data, more = write_news(tmp_path / "news"), write_news(tmp_path / "more", rows=200)
    options = BuildOptions("ag_news", runs=2, epochs=1, batch=64, data=data, workers=1)
    first = build(tmp_path / "first", options)
    original = first.word_vectors()
    assert original is not None
    assert original.vectors.shape == (len(original.vocabulary), 32)
    assert "Common4" in original.vocabulary  # case is kept
    assert first.network(0)(torch.randn(2, 7, 32)).shape == (2, 4)
    second = build(tmp_path / "second", replace(options, data=more, vectors=first.path))
    copied = second.word_vectors()
    assert copied is not None
    assert copied.vocabulary == original.vocabulary
    assert torch.equal(copied.vectors, original.vectors)
    assert verify(second.path, data=more, sample=2).ok
    with pytest.raises(ZooError, match="holds no word vectors: it is no zoo of text"):
        build(tmp_path / "third", replace(options, vectors=CHECKOUT / "mnist-sample"))
    assert not (tmp_path / "third").exists()


def test_word_vectors_of_a_zoo_by_name(tmp_path: Path) -> None:
    data, out = write_news(tmp_path / "news"), tmp_path / "zoo"
    how = ("--task", "ag_news", "--out", out, "--runs", 1, "--epochs", 1, "--data", data)
    assert_refused("no zoo of that name", "zoo", "build", *how, "--vectors", "no-such-zoo")
    assert not out.exists()
    printed("zoo", "build", *how, "--vectors", "ag-news-sample")
    copied, original = Zoo.open(out).word_vectors(), Zoo.open("ag-news-sample").word_vectors()
    assert copied is not None
    assert original is not None
    assert torch.equal(copied.vectors, original.vectors)


def _word2vec(path: Path, binary: bool, width: int = 40) -> np.ndarray:
    matrix = np.random.default_rng(0).normal(size=(5, width)).astype(np.float32)
    words = ["a", "Bär", "c", "d", "e"]
    with path.open("wb") as out:
        out.write(f"5 {width}\n".encode())
        for word, row in zip(words, matrix, strict=True):
            if binary:
                out.write(word.encode() + b" " + row.tobytes() + b"\n")
            else:
                numbers = " ".join(repr(float(x)) for x in row)
                out.write(f"{word} {numbers}\n".encode())
    return matrix


@pytest.mark.parametrize("binary", [False, True])
def test_word2vec_files_are_read_and_reduced_by_pca(tmp_path: Path, binary: bool) -> None:
    from sklearn.decomposition import PCA

    path = tmp_path / "vectors.bin"
    matrix = _word2vec(path, binary)
    found = dict(read_word2vec(path))
    assert list(found) == ["a", "Bär", "c", "d", "e"]
    np.testing.assert_allclose(found["Bär"], matrix[1], rtol=1e-6)
    reduced = load_vectors(path, {"a", "Bär", "d", "unseen"}, 32)
    assert reduced.vocabulary == ("a", "Bär", "d")
    # PCA keeps distances, and the signs of its axes are arbitrary.
    expected = torch.from_numpy(PCA(2).fit_transform(matrix[[0, 1, 3]].astype(np.float64)))
    torch.testing.assert_close(
        torch.cdist(reduced.vectors, reduced.vectors),
        torch.cdist(expected, expected).float(),
        rtol=1e-3,
        atol=1e-3,
    )


def test_invalid_word2vec_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "v.bin"
    path.write_text("hello\n")
    with pytest.raises(DataError, match="not a word2vec file"):
        list(read_word2vec(path))
    _word2vec(path, True)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="ends inside a vector"):
        list(read_word2vec(path))
    _word2vec(path, True, width=8)
    with pytest.raises(DataError, match="width 8, at least 32"):
        load_vectors(path, {"a"}, 32)
    with pytest.raises(DataError, match="none of the"):
        load_vectors(path, {"zzz"}, 8)


def test_invalid_idx_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(struct.pack(">HBBI", 0, 8, 1, 5) + bytes(4))
    with pytest.raises(DataError, match="expected 5 bytes of data, found 4"):
        images.read_idx(path)
    path.write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(DataError, match="not an idx file"):
        images.read_idx(path)


def test_labels_out_of_range_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"images": (3, 28, 28), "labels": (3,)}
    sums = []
    for name in images.FILES:
        shape = shapes["images" if "images" in name else "labels"]
        body = bytes([12]) * int(np.prod(shape))
        head = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        (tmp_path / name).write_bytes(gzip.compress(head + body))
        sums.append(hashlib.md5((tmp_path / name).read_bytes()).hexdigest())
    monkeypatch.setitem(images.MD5, "mnist", tuple(sums))
    with pytest.raises(DataError, match="label 12 is out of range"):
        load_task("mnist", tmp_path)
