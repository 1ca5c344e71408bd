"""How long does a cell of the paper's tables take, beside the literal way of doing it?

One epoch of Transformer-NFN over networks of the zoo's size, batch 16, several seeds: ours (the
library's trainer) and the literal transcription of the paper's pseudocode with a `DataLoader`,
`torch.optim.Adam` and one seed after another. Both sides in one run, warm, median over epochs;
the time of a whole cell (11,000 networks, 50 epochs, five seeds) is projected from it.

    python benchmarks/train.py [--json] [--networks 320] [--seeds 5] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "nn"))

from paper_transcription import PaperModel

from transformer_nfn import spaces
from transformer_nfn.experiments.dataset import Dataset, Parts
from transformer_nfn.experiments.predictors import module_builder
from transformer_nfn.experiments.protocol import Protocol
from transformer_nfn.experiments.training import SeedTrainer

CELL = 11_000 * 50 * 5
SPACE = spaces.attention_block(32, 2, 16, 16, 64)


def networks(n: int, device: str) -> Dataset:
    """Networks of the size of the AG News zoo, about the size of trained weights."""
    source = torch.Generator().manual_seed(0)
    blocks = [{k: 0.2 * w for k, w in SPACE.randn(n, generator=source).items()} for _ in range(2)]
    classifier = 0.2 * torch.randn(n, 1188, generator=source)
    accuracy = torch.rand(n, generator=source)
    data = Dataset(
        SPACE, {"blocks": blocks, "classifier": classifier}, accuracy, {"row": np.arange(n)}
    )
    return data.to(device)


class Networks(TorchDataset):  # type: ignore[type-arg]
    """One network at a time, as a `DataLoader` wants them."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, object]:
        network = self.data.network
        return {
            "blocks": [{k: w[i] for k, w in block.items()} for block in network["blocks"]],
            "classifier": network["classifier"][i],
            "accuracy": self.data.accuracy[i],
        }


def literal_epoch(data: Dataset, device: str) -> Callable[[], None]:
    """One epoch of one seed as one would write it from the paper."""
    torch.manual_seed(0)
    model = PaperModel(32, 2, [10], 1188).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Networks(data.to("cpu")), batch_size=16, shuffle=True)

    def run() -> None:
        for batch in loader:
            inputs = {
                "blocks": [{k: w.to(device) for k, w in b.items()} for b in batch["blocks"]],
                "classifier": batch["classifier"].to(device),
            }
            optimiser.zero_grad()
            target = batch["accuracy"].to(device)
            loss = torch.nn.functional.binary_cross_entropy(model(inputs), target)
            loss.backward()
            optimiser.step()
            loss.item()

    return run


def median_epoch(run: Callable[[], object], device: str, rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data = networks(options.networks, options.device)
    parts = Parts(data, data.take(torch.arange(32)), data.take(torch.arange(32)))
    out: dict[str, float] = {"networks": options.networks, "seeds": options.seeds}
    literal = median_epoch(literal_epoch(data, options.device), options.device, options.rounds)
    out["literal_networks_per_s"] = options.networks / literal
    for name, together in (("one_by_one", False), ("together", True)):
        trainer = SeedTrainer(
            module_builder("transformer_nfn", data, {}),
            parts,
            Protocol(epochs=10_000),
            list(range(options.seeds)),
            together=together,
        )
        spent = median_epoch(trainer.train_epoch, options.device, options.rounds)
        out[f"{name}_networks_per_s"] = options.networks * options.seeds / spent
        out[f"{name}_ratio"] = literal * options.seeds / spent
    best = max(out["one_by_one_networks_per_s"], out["together_networks_per_s"])
    out["cell_s"], out["literal_cell_s"] = CELL / best, CELL / out["literal_networks_per_s"]
    if options.json:
        print(json.dumps(out))
        return
    print(f"{options.device}, {torch.get_num_threads()} threads, {options.networks} networks")
    print(f"literal transcription      {out['literal_networks_per_s']:9.1f} networks/s")
    for name in ("one_by_one", "together"):
        print(
            f"ours, seeds {name.replace('_', ' '):14s} {out[f'{name}_networks_per_s']:9.1f} "
            f"networks/s   {out[f'{name}_ratio']:.1f}×"
        )
    print(
        f"a cell of 11,000 networks, 50 epochs, 5 seeds: {out['cell_s'] / 60:.1f} min, "
        f"literally {out['literal_cell_s'] / 60:.1f} min"
    )


if __name__ == "__main__":
    main()
