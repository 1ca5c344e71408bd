"""Small tasks, and one small zoo built once, for the tests of the zoo."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_nfn.zoo import BuildOptions, SizeGroup, Zoo, build
from transformer_nfn.zoo.training.tasks import (
    ImageOptions,
    ImageTask,
    Task,
    TextTask,
    WordVectors,
    image_task,
    load_task,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
SMALL = BuildOptions("digits", runs=12, epochs=2, batch=128, shard_runs=4, seed=3, workers=1)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_images(side: int = 8, patch: int = 2, white: int = 16, n: int = 300) -> ImageTask:
    """Random images whose brightness depends on the class."""
    draw = torch.Generator().manual_seed(side)
    labels = torch.randint(0, 10, (n,), generator=draw)
    noise = torch.randint(0, white // 4, (n, side, side), generator=draw)
    images = (noise + labels[:, None, None] * (white // 14)).to(torch.uint8)
    half = n * 2 // 3
    return image_task(
        "digits" if side == 8 else "mnist",
        (images[:half], labels[:half]),
        (images[half:], labels[half:]),
        ImageOptions(side=patch, white=white, padding=0 if side == 8 else 2, epochs=2),
    )


def write_news(folder: Path, rows: int = 300, header: bool = False) -> Path:
    """An AG News folder of invented sentences, whose words depend on the class."""
    draw = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", rows), ("test", rows // 2)):
        lines = ['"class","title","description"'] if header else []
        for _ in range(n):
            label = int(torch.randint(1, 5, (), generator=draw))
            length = int(torch.randint(1, 24, (), generator=draw))
            picks = torch.randint(0, 6, (length,), generator=draw).tolist()
            words = " ".join(f"w{label}{p}" if p < 4 else f"Common{p}" for p in picks)
            lines.append(f'"{label}","a title","{words}"')
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def random_vectors(width: int = 32) -> WordVectors:
    """Vectors for most words of `write_news`; some stay unknown."""
    words = [f"w{c}{p}" for c in range(1, 5) for p in range(4)] + ["Common4"]
    draw = torch.Generator().manual_seed(2)
    vectors = torch.randn(len(words), 32, generator=draw)
    return WordVectors(tuple(words), vectors.repeat(1, 2)[:, :width].contiguous(), "test")


@pytest.fixture(scope="session")
def news_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of `write_news`; tests must not change them."""
    return write_news(tmp_path_factory.mktemp("news"))


def small_task(name: str, news_folder: Path, group: SizeGroup | None = None) -> Task:
    """A small task for networks of any size."""
    group = group or SizeGroup()
    if name == "ag_news":
        vectors = random_vectors(group.width)
        return load_task("ag_news", news_folder, held=0.1, vectors=vectors, group=group)
    task = random_images() if name == "digits" else random_images(28, 4, 255)
    return replace(task, sizes=task.sizes.resized(group))


@pytest.fixture(scope="session")
def news(news_folder: Path) -> TextTask:
    """The text task on invented sentences."""
    task = small_task("ag_news", news_folder)
    assert isinstance(task, TextTask)
    return task


@pytest.fixture(params=["digits", "mnist", "ag_news"])
def any_task(request: pytest.FixtureRequest, news_folder: Path) -> Task:
    """A task for every form of input."""
    return small_task(request.param, news_folder)


@pytest.fixture(scope="session")
def small_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A digits zoo of 12 runs in 3 shards; tests must not change it."""
    return build(tmp_path_factory.mktemp("zoo") / "small", SMALL)


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of processes that a test starts: one thread each."""
    return os.environ | {"OMP_NUM_THREADS": "1"}
