"""Train zoos of tiny networks of several families by plain `transformers` code, a seed each.

    python benchmarks/family_zoos.py --out DIR [--data AG_NEWS] [--kinds vit,bert,gpt2,lm]
        [--networks 320] [--workers N] [--minutes M] [--seed S]

``DIR/vit``: ViTs that classify the digits of scikit-learn; ``DIR/bert`` and ``DIR/gpt2``:
classifiers of AG News by the first words of an article; ``DIR/lm``: GPT-2 language models of the
same texts. Each is a `ModelZoo` in half precision; what it says of a network (``test_accuracy``,
of language models ``perplexity``) was measured after rounding. Networks that diverge, and language
models worse than a uniform guess, are drawn again. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import multiprocessing
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strangers import find_data
from transformer_nfn.checkpoints import open_model
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.zoo import ModelZoo

KINDS = ("vit", "bert", "gpt2", "lm")
WORDS, LENGTH, TEST_TEXTS, BATCH = 512, 16, 1500, 32
RATES = {"adam": (5e-4, 1e-2), "rmsprop": (3e-4, 5e-3), "sgd": (1e-2, 0.2)}
SHARES = (0.4, 0.35, 0.25)
SHOWN = (0, 10, 25, 50, 75, 90, 100)
"""Percentiles in the table at the end."""
STEPS = {"vit": (30, 400), "bert": (40, 450), "gpt2": (30, 400), "lm": (25, 400)}


@dataclass(frozen=True)
class Data:
    """Inputs and labels to train and to test on."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def digits() -> Data:
    """Images ``[n, 1, 8, 8]``, the last 597 to test on."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float().reshape(-1, 1, 8, 8)
    return Data(images[:1200], labels[:1200], images[1200:], labels[1200:])


def articles(folder: Path) -> Data:
    """The first frequent words of every article that has enough of them; others are left out.

    Id 0 is no word: GPT-2 classifiers want one for padding.
    """
    texts = {name: _read(folder / f"{name}.csv.gz") for name in ("train_partial", "test")}
    counts = Counter(word for _, words in texts["train_partial"] for word in words)
    ids = {word: i for i, (word, _) in enumerate(counts.most_common(WORDS - 1), 1)}
    tables = []
    for part in texts.values():
        known = [(label, [ids[word] for word in words if word in ids]) for label, words in part]
        known = [(label, words[:LENGTH]) for label, words in known if len(words) >= LENGTH]
        tables.append(torch.tensor([words for _, words in known]))
        tables.append(torch.tensor([label for label, _ in known]))
    train, train_labels, test, test_labels = tables
    return Data(train, train_labels, test[:TEST_TEXTS], test_labels[:TEST_TEXTS])


def _read(path: Path) -> list[tuple[int, list[str]]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [(int(row[0]) - 1, " ".join(row[1:]).lower()) for row in csv.reader(file)]
    return [(label, re.findall(r"[a-z]+", text)) for label, text in rows]


def drawn(kind: str, generator: np.random.Generator) -> dict[str, Any]:
    """Hyperparameters of one network."""

    def logarithmic(low: float, high: float) -> float:
        return float(np.exp(generator.uniform(np.log(low), np.log(high))))

    optimizer = str(generator.choice(list(RATES), p=SHARES))
    return {
        "optimizer": optimizer,
        "learning_rate": logarithmic(*RATES[optimizer]),
        "weight_decay": logarithmic(1e-5, 1e-2),
        "dropout": float(generator.uniform(0, 0.3)),
        "steps": round(logarithmic(*STEPS[kind])),
        "train_fraction": logarithmic(0.02, 1.0),
        "init_std": logarithmic(0.02, 0.15),
    }


def fresh(kind: str, drawn: dict[str, Any]) -> nn.Module:
    """A network with two blocks of two heads, at its initialisation."""
    std, drop = drawn["init_std"], drawn["dropout"]
    words = dict(vocab_size=WORDS, num_labels=4, initializer_range=std)
    if kind in ("gpt2", "lm"):
        size = dict(n_embd=24, n_inner=48, n_positions=LENGTH, n_layer=2, n_head=2)
        special = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None, use_cache=False)
        drops = dict(resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop)
        config = transformers.GPT2Config(**words, **size, **special, **drops)
        if kind == "lm":
            return transformers.GPT2LMHeadModel(config)
        return transformers.GPT2ForSequenceClassification(config)
    common = dict(num_hidden_layers=2, num_attention_heads=2)
    common |= dict(hidden_dropout_prob=drop, attention_probs_dropout_prob=drop)
    if kind == "bert":
        size = dict(hidden_size=24, intermediate_size=48, max_position_embeddings=LENGTH)
        config = transformers.BertConfig(**words, **size, **common, type_vocab_size=1)
        return transformers.BertForSequenceClassification(config)
    size = dict(hidden_size=32, intermediate_size=64, image_size=8, patch_size=2, num_channels=1)
    config = transformers.ViTConfig(**size, **common, num_labels=10, initializer_range=std)
    return transformers.ViTForImageClassification(config)


def loss_of(model: nn.Module, kind: str, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the classes, or of each next word."""
    logits = model(inputs).logits
    if kind == "lm":
        return cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
    return cross_entropy(logits, labels)


def train(kind: str, seed: int, data: Data) -> tuple[nn.Module, dict[str, Any]]:
    """A trained network in half precision with its targets.

    What a seed gives does not depend on the other networks of a run.
    """
    generator = np.random.default_rng([KINDS.index(kind), seed])
    while True:
        torch.manual_seed(int(generator.integers(1 << 62)))
        targets = drawn(kind, generator)
        model = fresh(kind, targets).train()
        rate, decay = targets["learning_rate"], targets["weight_decay"]
        options: dict[str, Any] = {"lr": rate, "weight_decay": decay, "foreach": True}
        update = {
            "adam": torch.optim.AdamW,
            "sgd": partial(torch.optim.SGD, momentum=0.9),
            "rmsprop": torch.optim.RMSprop,
        }[targets["optimizer"]](model.parameters(), **options)
        used = max(BATCH, round(targets["train_fraction"] * len(data.train)))
        for _ in range(targets["steps"]):
            rows = torch.randint(used, (BATCH,))
            update.zero_grad()
            loss_of(model, kind, data.train[rows], data.train_labels[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
        measured = measure(model.half().float().eval(), kind, data)
        finite = all(w.isfinite().all() for w in model.state_dict().values())
        if finite and all(value <= WORDS for value in measured.values()):
            return model.half(), {**measured, **targets, "seed": seed}


@torch.no_grad()
def measure(model: nn.Module, kind: str, data: Data) -> dict[str, float]:
    """Accuracy, or perplexity, on what was not trained on."""
    if kind == "lm":
        loss = loss_of(model, kind, data.test, data.test_labels)
        return {"perplexity": float(loss.exp())}
    right = model(data.test).logits.argmax(-1) == data.test_labels
    return {"test_accuracy": float(right.float().mean())}


class Worker:
    """Trains networks of one process; data are sent to it once."""

    data: dict[str, Data]

    @classmethod
    def start(cls, data: dict[str, Data]) -> None:
        torch.set_num_threads(1)
        cls.data = data
        transformers.utils.logging.disable_progress_bar()

    @classmethod
    def run(cls, kind: str, scratch: Path, seed: int) -> tuple[Path, dict[str, Any]]:
        """Train one network; its folder, as `transformers` writes it, and its targets."""
        model, targets = train(kind, seed, cls.data[kind])
        model.save_pretrained(scratch / str(seed))  # type: ignore[operator]
        return scratch / str(seed), targets


def opened(
    results: Iterator[tuple[Path, dict[str, Any]]], total: int, deadline: float
) -> Iterator[tuple[Model, str, dict[str, Any]]]:
    """Networks as they are trained, each closed when the next is taken; prints progress."""
    for done, (folder, targets) in enumerate(results, 1):
        with open_model(folder) as model:
            yield model, f"seed-{targets['seed']}", targets
        if done % 20 == 0 or done == total:
            print(f"  {done} of {total}", flush=True)
        if time.monotonic() > deadline:
            return


def summary(kind: str, zoo: ModelZoo) -> str:
    """Sizes of a zoo and the spread of what it measured."""
    target = "perplexity" if kind == "lm" else "test_accuracy"
    if not len(zoo):
        return f"{kind}: empty"
    values = np.quantile(zoo.targets[target], [q / 100 for q in SHOWN])
    spread = "  ".join(f"{value:8.3f}" for value in values)
    return f"{kind:5}{len(zoo):8}{zoo.table['bytes'].sum() / 2**20:6.1f}  {target:14}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the zoos")
    parser.add_argument("--data", type=Path, default=find_data(), help="folder of AG News")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--networks", type=int, default=320, help="of each kind")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--seed", type=int, default=0, help="of the first network of each kind")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    kinds = options.kinds.split(",")
    texts = articles(options.data) if set(kinds) != {"vit"} else None
    data = {kind: digits() if kind == "vit" else texts for kind in kinds}
    zoos = {kind: ModelZoo.create(options.out / kind) for kind in kinds}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        context.Pool(options.workers, Worker.start, (data,)) as pool,
    ):
        for kind, zoo in zoos.items():
            there = set(zoo.targets["seed"].tolist()) if len(zoo) else set()
            seeds = range(options.seed, options.seed + options.networks)
            missing = [seed for seed in seeds if seed not in there]
            print(f"{kind}: {len(missing)} of {options.networks} to train", flush=True)
            task = partial(Worker.run, kind, Path(scratch) / kind)
            zoo.extend(opened(pool.imap(task, missing), len(missing), deadline))
            if time.monotonic() > deadline:
                break
    heads = "  ".join(f"{q:>6} %" for q in SHOWN)
    print(f"{'kind':5}{'networks':>8}{'MiB':>6}  {'target':14}{heads}")
    for kind, zoo in zoos.items():
        print(summary(kind, zoo))


if __name__ == "__main__":
    main()
