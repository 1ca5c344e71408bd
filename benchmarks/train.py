"""Benchmark of training: a cell of the paper's tables, beside a literal implementation.

One epoch of Transformer-NFN over networks of the zoo's size, batch 16, several seeds: ours (the
library's trainer) and the literal transcription of the paper's pseudocode with a `DataLoader`,
`torch.optim.Adam` and one seed after another. Both sides in one run, warm, median over epochs;
the time of a whole cell (11,000 networks, 50 epochs, five seeds) is projected from it. On a GPU
ours also with the step captured as a CUDA graph, and the most memory each way holds there.

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
from whole_networks import batch_of

from transformer_nfn import spaces
from transformer_nfn.prediction.data import Dataset, Parts
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import SeedTrainer

CELL = 11_000 * 50 * 5
SPACE = spaces.attention_block(32, 2, 16, 16, 64)


def networks(n: int, device: str) -> Dataset:
    """Networks of the size of the AG News zoo, about the size of trained weights."""
    source = torch.Generator().manual_seed(0)
    blocks = [{k: 0.2 * w for k, w in SPACE.randn(n, generator=source).items()} for _ in range(2)]
    classifier = 0.2 * torch.randn(n, 1188, generator=source)
    accuracy = torch.rand(n, generator=source)
    columns = {"row": np.arange(n), "run": np.arange(n).astype(str)}
    network = batch_of({"blocks": blocks, "classifier": classifier})
    data = Dataset(SPACE, network, accuracy, columns)
    return data.to(device)


class Networks(TorchDataset):  # type: ignore[type-arg]
    """One network at a time, as a `DataLoader` wants them."""

    def __init__(self, data: Dataset) -> None:
        self.data, self.blocks = data, data.network.blocks()
        self.classifier = data.network.views["classifier.W"]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, object]:
        return {
            "blocks": [{k: w[i] for k, w in block.items()} for block in self.blocks],
            "classifier": self.classifier[i],
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


def timed_epochs(run: Callable[[], object], device: str, rounds: int) -> tuple[float, float]:
    """Seconds of the first epoch, which sets things up, and the median of those after it."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def ways(device: str) -> dict[str, dict[str, bool]]:
    """How our trainer may run the seeds: on a GPU also with the step captured as a graph."""
    if device == "cuda":
        return {
            "one_by_one": {"together": False},
            "eager_together": {"together": True, "capture": False},
            "graph_together": {"together": True},
        }
    return {"one_by_one": {"together": False}, "together": {"together": True}}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Networks a second of every way, beside the literal one."""
    device, cuda = options.device, options.device == "cuda"
    data = networks(options.networks, device)
    parts = Parts(data, data.take(torch.arange(32)), data.take(torch.arange(32)))
    out: dict[str, float] = {"networks": options.networks, "seeds": options.seeds}
    _, literal = timed_epochs(literal_epoch(data, device), device, options.rounds)
    out["literal_networks_per_s"] = options.networks / literal
    for name, way in ways(device).items():
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer = SeedTrainer(
            predictor_builder("transformer_nfn", data, {}),
            parts,
            Protocol(epochs=10_000),
            list(range(options.seeds)),
            **way,
        )
        first, spent = timed_epochs(trainer.train_epoch, device, options.rounds)
        out[f"{name}_networks_per_s"] = options.networks * options.seeds / spent
        out[f"{name}_ratio"] = literal * options.seeds / spent
        if cuda:
            setup = max(0.0, first - spent)
            out[f"{name}_step_ms"] = 1e3 * spent / trainer.steps_per_epoch
            out[f"{name}_setup_s"] = setup
            out[f"{name}_cell_s"] = setup + CELL / out[f"{name}_networks_per_s"]
            out[f"{name}_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
            if trainer.graphs is not None:
                out[f"{name}_captured"] = float(not trainer.graphs.refused)
        del trainer
    best = max(out[f"{name}_networks_per_s"] for name in ways(device))
    out["cell_s"], out["literal_cell_s"] = CELL / best, CELL / out["literal_networks_per_s"]
    if cuda:
        # With what setting up takes, which a cell pays once.
        out["cell_s"] = min(out[f"{name}_cell_s"] for name in ways(device))
        out["cell_ratio"] = out["literal_cell_s"] / out["cell_s"]
    return out


def report(out: dict[str, float], device: str) -> str:
    """The numbers as lines."""
    cuda = device == "cuda"
    where = torch.cuda.get_device_name() if cuda else device
    lines = [
        f"{where}, {torch.get_num_threads()} threads, {out['networks']} networks",
        f"literal transcription      {out['literal_networks_per_s']:9.1f} networks/s",
    ]
    for name in ways(device):
        line = (
            f"ours, seeds {name.replace('_', ' '):14s} {out[f'{name}_networks_per_s']:9.1f} "
            f"networks/s   {out[f'{name}_ratio']:.1f}×"
        )
        if cuda:
            line += (
                f"   {out[f'{name}_step_ms']:.2f} ms a step, a cell {out[f'{name}_cell_s']:.0f} s "
                f"({out[f'{name}_setup_s']:.1f} s to set up), peak "
                f"{out[f'{name}_peak_mib']:.0f} MiB"
            )
        lines.append(line)
    cell = (
        f"a cell of 11,000 networks, 50 epochs, 5 seeds: {out['cell_s'] / 60:.1f} min, "
        f"literally {out['literal_cell_s'] / 60:.1f} min"
    )
    lines.append(f"{cell}: {out['cell_ratio']:.1f}×" if cuda else cell)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    out = measure(options)
    print(json.dumps(out) if options.json else report(out, options.device))


if __name__ == "__main__":
    main()
