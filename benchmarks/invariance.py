"""Benchmark of invariance: how far predictions move under each symmetry of the weights.

Trains every predictor on a zoo (one seed), writes the networks that it was not trained on in other
weights, one symmetry at a time, and prints the largest and the mean move of its predictions, the
largest of networks better than chance, and how many move by more than 1e-4. Symmetries act in
float64 and the result is rounded to float32, as networks are stored. That the function stays is
checked on random inputs: networks whose own answers (probabilities) move by more than 1e-5 are left
out, because LayerNorm's epsilon sees their scale:

    python benchmarks/invariance.py ZOO --out DIR [--epochs N] [--models mlp,…] [--device cpu]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.cli.options import pick_device
from transformer_nfn.models import WholeNetwork, map_network
from transformer_nfn.models.predictor import BUILT, Predictor, find, model_name, names
from transformer_nfn.models.whole_network import probe_outputs
from transformer_nfn.prediction.data import (
    Dataset,
    Parts,
    Selection,
    describe_zoo,
    joined,
    load_parts,
)
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.guard.responses import drawn_inputs
from transformer_nfn.prediction.predictors import load_predictors
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.zoo import Zoo

# The symmetries that the layers and invariants are tested by.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "nn"))
from whole_networks import MOVES, Moved, Net, move, move_all

SAME = 1e-5
"""By so much may a probability that a network answers with move."""
LIMIT = 1e-4
"""A prediction that moves by more is counted."""
ABLE = 0.15
"""More accurate than a network that answers all inputs alike, of ten classes."""
CONDITION = 100.0
"""Of the matrices in elements of the paper's group at most: more costs digits of float32."""
WORDS: Mapping[str, str] = {
    "paper": "the paper's group",
    "permute_heads": "heads permuted",
    "change_head_bases": "bases of heads",
    "permute_first_stream": "first stream permuted, with its positions",
    "permute_later_streams": "later streams permuted",
    "permute_middle_streams": "streams before MLPs permuted",
    "permute_neurons": "neurons permuted",
    "permute_hidden_units": "classifier's units permuted",
    "scale_neurons": "scales of ReLU",
    "scale_what_norms_read": "scales before LayerNorm",
    "shift_what_norms_read": "shifts before LayerNorm",
    "shift_what_reads_norms": "shifts behind LayerNorm",
    "all": "all of them",
}


@dataclass(frozen=True)
class Disguise:
    """The networks that kept their function under one symmetry, before and after."""

    before: Dataset
    after: Dataset
    positions: Tensor
    answers_move: float


def main() -> None:
    """Trains, moves, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--models", default=",".join(names(BUILT)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    zoo = Zoo.open(given.zoo)
    parts = load_parts(zoo, Selection(all_checkpoints=True))
    unseen = joined(parts.val, parts.test)
    disguises = {name: disguise(name, unseen, zoo) for name in WORDS}
    print(f"{len(unseen)} networks of {zoo.path.name}; those that keep their function, and how far")
    for name, made in disguises.items():
        kept, moved = len(made.after), made.answers_move
        print(f"- {WORDS[name]}: {kept}, probabilities move by at most {moved:.0e}")
    found = {}
    for model in given.models.split(","):
        predictor = fitted(model, zoo, parts, given)
        found[model_name(model)] = {
            name: moves(predictor, made) for name, made in disguises.items()
        }
    print()
    print(table(found))
    print(f"\nThe largest move of networks above {ABLE:.0%}:\n")
    print(table(found, lambda m: f"{m['largest_able']:.0e}"))
    print(f"\nNetworks whose prediction moves by more than {LIMIT:.0e}:\n")
    print(table(found, lambda m: str(m["over"])))
    if given.json is not None:
        kept = {name: len(made.after) for name, made in disguises.items()}
        given.json.write_text(json.dumps({"networks": kept, "moves": found}, indent=1) + "\n")


def fitted(model: str, zoo: Zoo, parts: Parts, given: argparse.Namespace) -> Predictor:
    """One seed of a predictor, trained or read."""
    if not find(model).every_checkpoint:
        parts = replace(parts, more=None)
    out = given.out / model
    on = pick_device(given.device)
    protocol = Protocol.of(model, given.epochs)
    experiment = Experiment(model, [0], protocol, selection=Selection().to_json())
    record = train_run(describe_zoo(zoo), parts.to(on), experiment, out)
    return load_predictors(out, record)[0]


def disguise(name: str, data: Dataset, zoo: Zoo) -> Disguise:
    """The networks under one symmetry, in float32."""
    positions = zoo.sizes.positions().double()
    wide = replace(data, network=map_network(data.network, lambda w: w.double()))
    if name == "paper":
        moved = Moved(_paper(wide), positions)
    elif name == "all":
        moved = move_all(_net(wide), positions)
    else:
        how: Callable[[Net, Tensor], Moved] = next(m for m in MOVES if m.__name__ == name)
        moved = move(how, _net(wide), positions)
    after = replace(data, network=map_network(moved.network, lambda w: w.float()))
    change = _answers(after, zoo, moved.positions) - _answers(data, zoo, positions)
    apart = change.abs().flatten(1).amax(1)
    kept = (apart <= SAME).nonzero()[:, 0]
    largest = float(apart[kept].max()) if len(kept) else float("nan")
    return Disguise(data.take(kept), after.take(kept), moved.positions.float(), largest)


def _paper(data: Dataset) -> Net:
    """Every block moved by an element of its own of the paper's group."""
    generator = torch.Generator().manual_seed(0)
    group = data.block_space.group
    elements = [
        group.random(generator, batch=len(data), max_condition=CONDITION)
        for _ in data.network["blocks"]
    ]
    pairs = zip(elements, data.network["blocks"], strict=True)
    return {**data.network, "blocks": [element.act(block) for element, block in pairs]}


def _net(data: Dataset) -> Net:
    return deepcopy({part: value for part, value in data.network.items() if value is not None})


@torch.no_grad()
def _answers(data: Dataset, zoo: Zoo, positions: Tensor) -> Tensor:
    """Probabilities that the networks answer with, computed in float64."""
    wide = map_network(data.network, lambda w: w.double())
    return probe_outputs(wide, drawn_inputs(zoo.sizes).double(), positions).logits.softmax(-1)


def moves(predictor: Predictor, made: Disguise) -> dict[str, float]:
    """The largest and the mean move of the predictions."""
    if not len(made.after):
        return dict.fromkeys(("largest", "largest_able", "mean", "over"), float("nan"))
    after = made.after
    if isinstance(predictor, WholeNetwork):
        # The only predictor that reads positions: they are part of a network whose first stream
        # is permuted or shifted.
        with torch.no_grad():
            said = torch.sigmoid(predictor.logits(after.network, made.positions))
    else:
        said = predictor.predict(after.network)
    apart = (said - predictor.predict(made.before.network)).abs()
    able = apart[made.before.accuracy > ABLE]
    return {
        "largest": float(apart.max()),
        "largest_able": float(able.max()) if len(able) else float("nan"),
        "mean": float(apart.mean()),
        "over": int((apart > LIMIT).sum()),
    }


def largest_and_mean(one: Mapping[str, Any]) -> str:
    """As a cell of the table."""
    return f"{one['largest']:.0e} ({one['mean']:.0e})"


def table(
    found: Mapping[str, Mapping[str, Mapping[str, Any]]],
    cell: Callable[[Mapping[str, Any]], str] = largest_and_mean,
) -> str:
    """A row for each symmetry, a column for each model."""
    lines = [
        "| Symmetry | " + " | ".join(found) + " |",
        "|---|" + "--:|" * len(found),
    ]
    for name, words in WORDS.items():
        cells = [cell(moves_of[name]) for moves_of in found.values()]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
