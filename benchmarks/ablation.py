"""Ablation of `WholeNetwork`: parts of the model and of its training alone, left out or added.

Trains every variant on the same networks and prints Kendall's tau on the test part: the mean over
seeds with its standard error, and that of the mean of their predictions; of all test networks, and
of those at least 80 % accurate. Finished rows are kept in DIR, so an interrupted call resumes:

    python benchmarks/ablation.py ZOO --out DIR [--device auto] [--seeds 5] [--train N]
        [--epochs N] [--only whole,probes,…] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from transformer_nfn.cli.options import pick_device
from transformer_nfn.models import WholeNetwork
from transformer_nfn.models.network import in_chunks
from transformer_nfn.models.predictor import LearningSet, predictor
from transformer_nfn.models.probing import channel_responses, second_moments
from transformer_nfn.models.task_reader import TaskReader
from transformer_nfn.models.whole_network.model import LEARNED_PROBES, head
from transformer_nfn.models.whole_network.probes import CHUNK, observed_logits
from transformer_nfn.prediction.data import (
    PERCENT,
    Parts,
    Selection,
    describe_zoo,
    load_parts,
)
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.metrics import kendall_tau, standard_error
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunRecord, predictions_on_test, read_predictions
from transformer_nfn.zoo import Zoo

MODEL = "ablated_network"
HIDDEN = "hidden"
"""Key of a network that holds its hidden responses."""
HIGH = 0.8
FEWEST = 10
"""Test networks from 80 % on that a tau of them needs."""


@predictor(MODEL)
class AblatedNetwork(WholeNetwork):
    """`WholeNetwork` with switches; its defaults are the model itself.

    Args:
        parts: any of ``probes``, ``invariants`` and ``hidden`` (responses to the probes behind each
            block, as in `HiddenProbe`).
        search, learn_probes, order: see `WholeNetwork`.
        bounded: whether probes of images are bounded.
        sizes: arguments of `WholeNetwork`.
    """

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """The model for networks like these, however many."""
        made: Self = TaskReader.of.__func__(cls, data, **options)  # type: ignore[attr-defined]
        return made

    def __init__(
        self,
        *arguments: Any,
        parts: Sequence[str] = ("probes", "invariants"),
        search: bool = True,
        learn_probes: bool = False,
        order: float = 0.3,
        bounded: bool = True,
        **sizes: Any,
    ) -> None:
        if "probes" not in parts:
            sizes["probes"] = 0
        super().__init__(*arguments, **sizes)
        self.search, self.learn_probes, self.order = search, learn_probes, order
        self.parts = parts
        if self.probes is not None and not bounded:
            self.probes.bounded = False
            nn.init.zeros_(self.probes.base)
        if "invariants" not in parts:
            self.invariant_head = None
        if "hidden" in parts:
            self.hidden_head = head(2 * sizes["classes"] ** 2, self.config["hidden"])

    def head_inputs(self, network: Mapping[str, Any]) -> dict[str, Any]:
        """With hidden responses where they are read."""
        inputs = super().head_inputs(network)
        if "hidden" in self.parts:
            inputs[HIDDEN] = self._hidden(network, None)
        return inputs

    @torch.no_grad()
    def _hidden(self, network: Mapping[str, Any], positions: Tensor | None) -> Tensor:
        """Second moments of the mean responses to the probes of each class, behind each block."""
        assert self.probes is not None
        inputs, where = self.probes(), self._where(network, positions)
        of_class = one_hot(self.probes.labels).to(inputs).mT
        means = of_class / of_class.sum(1, keepdim=True)
        rows = []
        for part in in_chunks(network, CHUNK):
            codes: list[Tensor] = []

            def observe(x: Tensor, codes: list[Tensor] = codes) -> None:
                responses = channel_responses(x).unflatten(1, x.shape[1:3]).mean(2)
                codes.append(means @ responses)

            observed_logits(part, inputs, where, observe)
            rows.append(second_moments(codes))
        return torch.cat(rows)

    def _features(
        self, network: Mapping[str, Any], positions: Tensor | None
    ) -> Iterator[tuple[nn.Module, Tensor]]:
        yield from super()._features(network, positions)
        if "hidden" in self.parts:
            stored = network.get(HIDDEN)
            yield self.hidden_head, self._hidden(network, positions) if stored is None else stored


@dataclass(frozen=True)
class Row:
    """A row of the table: what it is called, and how the model differs from the default."""

    words: str
    options: Mapping[str, Any] = field(default_factory=dict)
    all_checkpoints: bool = True


ROWS: Mapping[str, Row] = {
    "whole": Row("**Whole network** (probes and invariants)"),
    "hidden": Row("with hidden responses too", {"parts": ["probes", "invariants", "hidden"]}),
    "probes": Row("probes alone", {"parts": ["probes"]}),
    "invariants": Row("invariants alone", {"parts": ["invariants"]}),
    "no-checkpoints": Row(f"without other checkpoints than that at {PERCENT} %", {}, False),
    "no-search": Row("without the search of probes (noise)", {"search": False}),
    "no-bounds": Row("without bounds on pixels", {"bounded": False}),
    "no-order": Row("without the price of wrong order", {"order": 0.0}),
    "probes-64": Row("64 probes", {"probes": 64, "hidden": 64}),
    "probes-128": Row("128 probes", {"probes": 128, "hidden": 64}),
    "probes-256": Row("256 probes", {"probes": 256, "hidden": 32}),
    "head-64": Row("64 neurons in the head on outputs", {"hidden": 64}),
    "learned": Row("probes learn with the heads", LEARNED_PROBES | {"learn_probes": True}),
    "head-256": Row("256 neurons in the head on outputs", {"hidden": 256}),
}
HEADER = (
    "| Model | Parameters | τ, each seed | together | τ from 80 %, each seed | together |\n"
    "|---|--:|--:|--:|--:|--:|"
)


def main() -> None:
    """Fills the rows that were asked for and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train", type=int, help="at most this many networks to train on")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--only", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row '{unknown[0]}'; there are {', '.join(ROWS)}")
    zoo = Zoo.open(given.zoo)
    parts = load_parts(zoo, Selection(max_train=given.train, all_checkpoints=True))
    parts = parts.to(pick_device(given.device))
    high = int((parts.test.accuracy >= HIGH).sum())
    counts = ", ".join(f"{number:,} {part}" for part, number in parts.counts.items())
    print(f"{zoo.path.name}: {counts}; {high} of the test networks from 80 %\n")
    print(HEADER, flush=True)
    found = {}
    for name in names:
        found[name] = fill(name, zoo, parts, given)
        print(line(ROWS[name].words, found[name]), flush=True)
    if given.json is not None:
        description = {"zoo": describe_zoo(zoo), "networks": parts.counts, "test_from_80": high}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**description, "rows": found}, indent=1) + "\n")


def fill(name: str, zoo: Zoo, parts: Parts, given: argparse.Namespace) -> dict[str, Any]:
    """Trains one row, or reads it where it is there, and measures it."""
    row = ROWS[name]
    selection = Selection(max_train=given.train).to_json()
    if not row.all_checkpoints:
        selection["all_checkpoints"] = False
    experiment = Experiment(
        MODEL,
        range(given.seeds),
        Protocol.of(MODEL, given.epochs),
        row.options,
        selection,
        keep=False,
    )
    parts = parts if row.all_checkpoints else replace(parts, more=None)
    record = train_run(describe_zoo(zoo), parts, experiment, given.out / name)
    return {"options": dict(row.options), **measured(record, given.out / name)}


def measured(record: RunRecord, folder: Path) -> dict[str, Any]:
    """Tau of each seed and of all together, of all test networks and of the accurate ones."""
    accuracy, predicted = predictions_on_test(read_predictions(folder))
    found: dict[str, Any] = {
        "parameters": record.num_parameters,
        "seconds_a_seed": record.seeds[0]["seconds"],
    }
    for where, chosen in (("all", accuracy >= 0), ("from_80", accuracy >= HIGH)):
        if int(chosen.sum()) < FEWEST:
            found[where] = None
            continue
        taus = [kendall_tau(accuracy[chosen], one[chosen]) for one in predicted]
        found[where] = {
            "tau": float(np.mean(taus)),
            "tau_se": standard_error(taus),
            "tau_together": kendall_tau(accuracy[chosen], predicted.mean(0)[chosen]),
            "seeds": taus,
        }
    return found


def line(words: str, found: Mapping[str, Any]) -> str:
    """A row of the table."""
    cells = [words, f"{found['parameters']:,}"]
    for where in ("all", "from_80"):
        one = found[where]
        if one is None:
            cells += ["–", "–"]
            continue
        error = "" if one["tau_se"] is None else f" ± {one['tau_se']:.3f}"
        cells += [f"{one['tau']:.3f}{error}", f"{one['tau_together']:.3f}"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
