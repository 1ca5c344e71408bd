"""Why StatNN leads on long MNIST runs here and not in the paper: one change of protocol per row.

Trains StatNN, the MLP and Transformer-NFN on a zoo under the protocol of table 1 and under changed
ones. τ on the test and validation networks is taken after every epoch, so each training shows the
epoch chosen on validation data, the epoch chosen on test data, and the last epoch:

    python benchmarks/statnn.py ZOO --out DIR [--only ours,scaled,…] [--train 3000,11200]
        [--models statnn,mlp,…] [--splits 1] [--seeds 3] [--epochs 50] [--device auto]
        [--json FILE]

Finished rows are kept in DIR, so calls may run side by side and an interrupted one resumes.
FILE is a table of `tools/result_tables.py`: the rows of DIR that have all models in all splits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_nfn.cli.options import pick_device
from transformer_nfn.io.files import write_text
from transformer_nfn.known_tasks import seeds_text, task_title
from transformer_nfn.models import StatNN, map_network, tensors_of
from transformer_nfn.models.baselines import STATISTICS
from transformer_nfn.models.network import flat
from transformer_nfn.models.predictor import model_name
from transformer_nfn.prediction.data import (
    PERCENT,
    Dataset,
    Parts,
    Selection,
    joined,
    load_parts,
    load_rows,
    nested_subset,
)
from transformer_nfn.prediction.metrics import kendall_tau, standard_error
from transformer_nfn.prediction.predictors import predictor_builder, prepared
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import SeedTrainer
from transformer_nfn.zoo import Zoo

MODELS = ("statnn", "mlp", "transformer_nfn")
TWIN_L2 = 1e-6
"""Up to here weight decay does next to nothing: runs that differ in it alone are twins."""
SAME_RECIPE = ("optimizer", "learning_rate", "init_std", "dropout", "train_fraction")
LEAST_STD = 1e-5
CHOICES = {"val": "", "test": "best epoch chosen on test data", "last": "last epoch"}
"""Ways to choose the epoch, with the words of a row."""


@dataclass(frozen=True)
class Row:
    """A protocol: that of table 1 with at most one change.

    Attributes:
        words: of the table.
        authors: modules as in the authors' published code.
        scaled: standardise inputs over the training networks.
        embedding: whether the embedding is read.
        constant: keep the learning rate after the warm-up.
        longer: factor on the epochs.
        least: lowest accuracy of a network.
        checkpoints: train on any checkpoint of any run, those of test runs too.
        twins: ``removed`` from the training networks if a twin is in the test part, or ``control``,
            as many removed at random.
    """

    words: str
    authors: bool = False
    scaled: bool = False
    embedding: bool = True
    constant: bool = False
    longer: int = 1
    least: float = 0.0
    checkpoints: bool = False
    twins: str = ""


ROWS = {
    "ours": Row("protocol of table 1"),
    "authors": Row("modules as in the authors' code", authors=True),
    "scaled": Row("inputs standardised", scaled=True),
    "no-embedding": Row("embedding not read", embedding=False),
    "constant": Row("constant learning rate after warm-up", constant=True),
    "longer": Row("100 epochs, the default of the authors' code", longer=2),
    "from-10": Row("networks from 10 % accuracy, the default of the authors' code", least=0.1),
    "checkpoints": Row("other checkpoints of test runs in training", checkpoints=True),
    "twins": Row("no twins of test networks in training", twins="removed"),
    "control": Row("as many networks removed at random", twins="control"),
}


class AuthorsStatNN(StatNN):
    """`StatNN` with a linear reading of the embedding: no ReLU behind its layer."""

    def logits_from_features(self, features: Tensor) -> Tensor:
        """The number before the Sigmoid."""
        blocks, classifier, embedding = features.split(self._widths, -1)
        parts = [torch.relu(self.encoder(blocks)), torch.relu(self.classifier(classifier))]
        parts.append(self.embedding(embedding))
        out: Tensor = self.head(torch.cat(parts, -1)).squeeze(-1)
        return out


class AuthorsMLP(nn.Module):
    """The authors' MLP: one layer reads all blocks; as many parameters as `MLP`."""

    def __init__(self, data: Dataset, hidden: int = 50) -> None:
        super().__init__()
        blocks = sum(w[0].numel() for block in data.network["blocks"] for w in block.values())
        self.widths = {"blocks": blocks, **{k: n for k, n in data.sizes.items() if n}}
        self.readers = nn.ModuleDict(
            {
                "blocks": _relu_layers([blocks, hidden, hidden]),
                "classifier": _relu_layers([self.widths["classifier"], hidden, hidden, hidden]),
            }
        )
        if "embedding" in self.widths:
            self.readers["embedding"] = nn.Linear(self.widths["embedding"], hidden)
        self.head = nn.Linear(hidden * len(self.readers), 1)

    def logits(self, network: Mapping[str, Any]) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        blocks = [w.flatten(1) for block in network["blocks"] for w in block.values()]
        network = {**network, "blocks": torch.cat(blocks, -1)}
        parts = [read(flat(network, k, self.widths[k])) for k, read in self.readers.items()]
        out: Tensor = self.head(torch.cat(parts, -1)).squeeze(-1)
        return out


def _relu_layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, width in enumerate(widths[1:]):
        layers += [nn.Linear(widths[i], width), nn.ReLU()]
    return nn.Sequential(*layers)


def new_module(name: str, data: Dataset, authors: bool) -> nn.Module:
    """A fresh predictor, of this library or with the details of the authors' code."""
    if not authors or name == "transformer_nfn":
        module = predictor_builder(name, data, {})()
        if authors:
            assert isinstance(module.classifier, nn.Sequential)
            module.classifier.append(nn.ReLU())
        return module
    if name == "mlp":
        return AuthorsMLP(data)
    return AuthorsStatNN(data.block_space, len(data.network["blocks"]), **data.sizes)


def changed(parts: Parts, row: Row, zoo: Zoo, size: int | None) -> Parts:
    """The networks of a row."""
    train, val, test = parts.train, parts.val, parts.test
    if row.checkpoints:
        held = np.concatenate([val.columns["row"], test.columns["row"]])
        free = np.setdiff1d(zoo.select(percent=None), held)
        chosen = nested_subset(free, size or len(train), 0)
        train = load_rows(zoo, chosen).to(train.accuracy.device)
    if row.twins:
        kept = np.flatnonzero(~has_twin(train, test))
        if row.twins == "control":
            kept = nested_subset(np.arange(len(train)), len(kept), 1)
        train = train.take(kept)
    if size is not None and size < len(train):
        train = train.take(nested_subset(np.arange(len(train)), size, 0))
    chosen_parts = [train, val, test]
    if row.least:
        chosen_parts = [d.take((d.accuracy >= row.least).nonzero()[:, 0]) for d in chosen_parts]
    if not row.embedding:
        chosen_parts = [_without_embedding(d) for d in chosen_parts]
    return Parts(*chosen_parts)


def _without_embedding(data: Dataset) -> Dataset:
    kept = {part: w for part, w in data.network.items() if part != "embedding"}
    return replace(data, network=kept)


def has_twin(data: Dataset, others: Dataset) -> np.ndarray:
    """Which networks of a data set have a twin among others: the same recipe but for a tiny L2."""
    recipes = set(_recipes(others)) - {None}
    return np.array([recipe in recipes for recipe in _recipes(data)])


def _recipes(data: Dataset) -> list[tuple[Any, ...] | None]:
    tiny = data.columns["l2"] <= TWIN_L2
    recipes = zip(*(data.columns[name].tolist() for name in SAME_RECIPE), strict=True)
    return [recipe if small else None for recipe, small in zip(recipes, tiny, strict=True)]


def describe_twins(data: Dataset, others: Dataset) -> dict[str, float]:
    """Share of networks with a twin among others, how near it is, and τ of predicting by it.

    The distance is that of all weights, relative to their norm; medians.
    """
    recipes = _recipes(others)
    place = {recipe: i for i, recipe in enumerate(recipes) if recipe is not None}
    pairs = [(i, place[r]) for i, r in enumerate(_recipes(data)) if r in place]
    if len(pairs) < 2:
        return {"share": len(pairs) / len(data)}
    first, second = (torch.tensor(at) for at in zip(*pairs, strict=True))
    a, b = (
        torch.cat([w.flatten(1) for w in tensors_of(d.take(at).network).values()], 1)
        for d, at in ((data, first), (others, second))
    )
    distance = (a - b).norm(dim=1) / a.norm(dim=1)
    return {
        "share": len(pairs) / len(data),
        "distance": float(distance.median()),
        "tau": kendall_tau(data.truth[first.numpy()], others.truth[second.numpy()]),
    }


def standardised(parts: Parts, module: nn.Module) -> Parts:
    """Every number that a module reads, standardised over the training networks.

    Those are the entries of the weights, or the features of StatNN.
    """
    data = [parts.train, parts.val, parts.test]
    if isinstance(module, StatNN):
        features = [prepared(module, d).network[STATISTICS] for d in data]
        data = [replace(d, network={STATISTICS: x}) for d, x in zip(data, features, strict=True)]
    train = tensors_of(data[0].network).values()
    means = [w.mean(0) for w in train]
    stds = [torch.where(w.std(0) < LEAST_STD, 1.0, w.std(0)) for w in train]

    def scale(d: Dataset) -> Dataset:
        scales = zip(means, stds, strict=True)

        def change(w: Tensor) -> Tensor:
            mean, std = next(scales)
            return (w - mean) / std

        return replace(d, network=map_network(d.network, change))

    return Parts(*map(scale, data))


def measure(name: str, parts: Parts, row: Row, seeds: int, epochs: int) -> dict[str, list[float]]:
    """Trains all seeds of a model; τ on the test networks for each `CHOICES` of the epoch."""
    build = partial(new_module, name, parts.train, row.authors)
    protocol = Protocol(epochs * row.longer)
    if row.constant:
        protocol = replace(protocol, final_lr=protocol.lr)
    if row.scaled:
        parts = standardised(parts, build().to(parts.train.accuracy.device))
    held = replace(parts, val=joined(parts.val, parts.test))
    trainer = SeedTrainer(build, held, protocol, list(range(seeds)), together=True)
    for _ in trainer.start():
        pass
    val, test = parts.val.truth, parts.test.truth
    taus = []  # epoch, seed, (validation, test)
    while trainer.epoch < protocol.epochs:
        trainer.train_epoch()
        predicted = trainer.predict(0).numpy()
        both = [(p[: len(val)], p[len(val) :]) for p in predicted]
        taus.append([(kendall_tau(val, v), kendall_tau(test, t)) for v, t in both])
    table = np.array(taus)
    last = np.full(seeds, len(table) - 1)
    chosen = {"val": table[:, :, 0].argmax(0), "test": table[:, :, 1].argmax(0), "last": last}
    return {choice: table[at, np.arange(seeds), 1].tolist() for choice, at in chosen.items()}


def main() -> None:
    """Trains what is missing, and writes the table of all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--train", default="", help="numbers of training networks (all)")
    parser.add_argument("--splits", type=int, default=1, help="random splits of the zoo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=Protocol().epochs)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    zoo = Zoo.open(given.zoo)
    folder = given.out / zoo.path.name
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [int(n) for n in given.train.split(",") if n] or [None]
    for split in range(given.splits):
        parts = load_parts(zoo, Selection(split_seed=split)).to(pick_device(given.device))
        for size, key, name in product(sizes, given.only.split(","), given.models.split(",")):
            file = folder / f"{key}.{size or 'all'}.{name}.{split}.json"
            if file.is_file():
                continue
            networks = changed(parts, ROWS[key], zoo, size)
            cell = measure(name, networks, ROWS[key], given.seeds, given.epochs)
            twins = describe_twins(networks.test, networks.train)
            found = {
                "row": key, "size": size or len(parts.train), "model": name, "split": split,
                "networks": networks.counts, "twins": twins, "taus": cell,
            }  # fmt: skip
            write_text(file, json.dumps(found, indent=1) + "\n")
            tau = np.mean(cell["val"])
            print(f"{key}, {len(networks.train):,}, {name}, split {split}: {tau:.3f}", flush=True)
    if given.json is not None:
        files = sorted(folder.glob("*.json"))
        cells = [json.loads(file.read_text()) for file in files]
        table = results_table(zoo, [c for c in cells if c["split"] < given.splits], given.splits)
        write_text(given.json, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def results_table(zoo: Zoo, cells: Sequence[dict[str, Any]], splits: int) -> dict[str, Any]:
    """A row for each change and number of training networks, with Transformer-NFN's lead."""
    places: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for cell in cells:
        places.setdefault((list(ROWS).index(cell["row"]), cell["size"]), []).append(cell)
    places = {at: here for at, here in places.items() if len(here) == splits * len(MODELS)}
    changed_sizes = {size for index, size in places if index}
    rows = []
    for index, size in sorted(places):
        here = places[index, size]
        train = round(np.mean([c["networks"]["train"] for c in here]))
        for choice, words in CHOICES.items():
            if words and (index or size not in changed_sizes):
                continue
            taus = [np.array([c["taus"][choice] for c in here if c["model"] == m]) for m in MODELS]
            row = [words or list(ROWS.values())[index].words, f"{train:,}"]
            lead = tau_text(taus[-1] - taus[0], sign="+")
            rows.append([*row, *map(tau_text, taus), lead])
    ours = places[max(at for at in places if not at[0])][0]
    counts, seeds = ours["networks"], len(ours["taus"]["val"])
    twins = 100 * ours["twins"]["share"]
    epoch = int(zoo.table["epoch"][zoo.select(percent=PERCENT)].max())
    times = f"{splits} splits of {seeds} seeds" if splits > 1 else f"{seeds} seeds"
    return {
        "title": f"StatNN, MLP and Transformer-NFN, {task_title(zoo.metadata['task']['name'])}",
        "setting": f"{len(np.unique(zoo.table['run'])):,} runs, {seeds_text(zoo.seeds)}, read at "
        f"epoch {epoch}; {counts['test']:,} test networks, {twins:.0f} % with a twin among "
        f"{counts['train']:,} training networks; {times}.",
        "commands": [
            f"python benchmarks/statnn.py {zoo.path.name} --splits {splits} --seeds {seeds} "
            "--out DIR --json FILE"
        ],
        "columns": ["Protocol", "training networks", *(model_name(m) for m in MODELS),
                    "lead of Transformer-NFN"],
        "rows": rows,
        "cells": [cell for here in places.values() for cell in here],
    }  # fmt: skip


def tau_text(taus: np.ndarray, sign: str = "") -> str:
    """Mean of ``[splits, seeds]`` and its standard error: over splits, or over the seeds of one."""
    error = standard_error((taus.mean(1) if len(taus) > 1 else taus[0]).tolist())
    tau = f"{taus.mean():{sign}.3f}".replace("-", "−")
    return tau if error is None else f"{tau} ± {error:.3f}"


if __name__ == "__main__":
    main()
