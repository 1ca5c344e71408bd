"""The zoos themselves, where they are at hand: the accuracies of all networks, and their rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transformer_nfn.io.assets import resolve
from transformer_nfn.paper.gather import Study, ZooStudy
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.report.held_out import DIGITS, Networks, held_out
from transformer_nfn.zoo import Zoo


@dataclass(frozen=True)
class WholeZoo:
    """A zoo as a user named it.

    Attributes:
        text: its path or name, as `tnfn predict` takes it before ``#``.
        row: of every network that the runs could be chosen from.
        run: the training each comes from.
        accuracy: of each.
    """

    text: str
    row: np.ndarray
    run: np.ndarray
    accuracy: np.ndarray

    def rows_of(self, networks: Networks) -> list[int | None]:
        """Where networks stand in this zoo, by their training and their accuracy."""
        keys = zip(self.run.tolist(), self.accuracy.tolist(), strict=True)
        place = dict(zip(keys, self.row.tolist(), strict=True))
        pairs = zip(networks.run, networks.accuracy.tolist(), strict=True)
        return [place.get((str(run), accuracy)) for run, accuracy in pairs]


def whole_zoos(study: Study, texts: list[str]) -> dict[str, WholeZoo]:
    """Finds for each named zoo the runs made on it; by the label of those runs.

    A zoo is the one that the runs were made on if every held-out network of them is in it: from
    the same training, with the same accuracy.
    """
    found: dict[str, WholeZoo] = {}
    for text in texts:
        opened = Zoo.open(resolve(text, "zoo"))
        fitting = {zoo.label: whole for zoo in study.zoos if (whole := _if_of(text, opened, zoo))}
        if not fitting:
            raise RunError(
                f"'{text}' is not the zoo of these runs: expected the networks that they were "
                "tested on, by training and accuracy, found others"
            )
        found |= fitting
    return found


def _if_of(text: str, opened: Zoo, zoo: ZooStudy) -> WholeZoo | None:
    networks = held_out(zoo).networks
    if zoo.best is None or not len(networks.row):
        return None
    chosen = zoo.best.record.selection
    rows = opened.select(
        percent=chosen.get("percent"), min_accuracy=chosen.get("min_accuracy") or None
    )
    accuracy = np.round(opened.table["test_accuracy"][rows].astype(float), DIGITS)
    whole = WholeZoo(text, rows, opened.table["run"][rows].astype(str), accuracy)
    return None if None in whole.rows_of(networks) else whole
