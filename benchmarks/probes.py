"""What does it cost to ask networks by probes?

On a CPU the C pass against PyTorch, in one run: CPU-seconds per million pairs of a network and a
probe, all threads together, forward and forward with the gradient of the probes; of several
repetitions taken in turn the fastest counts. CPU time, not the clock, so that other work on the
machine does not matter much.

On a GPU milliseconds per update of the rivals that learn probes, by their recipe, on random
networks of the paper's size: with and without captured CUDA graphs, of one seed and of three; the
kernels that take longest, and what TF32 changes in the outputs.

    python benchmarks/probes.py [--tasks mnist digits …] [--threads N] [--json FILE]
    python benchmarks/probes.py --device cuda [--tasks mnist ag_news] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from transformer_nfn import native_network
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.models import Batch
from transformer_nfn.models.whole_network.probes import ProbeOutputs, probe_outputs
from transformer_nfn.native_network import probing, why_not
from transformer_nfn.prediction.data import Dataset, Parts
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import SeedTrainer
from transformer_nfn.zoo import NetworkSizes

NETWORKS, PROBES, REPETITIONS = 32, 64, 5
MAX_TOKENS = 64
"""Most tokens of a probe; a text may have more."""
RIVALS = ("hidden_probe", "probegen")
TRAINING, VALIDATION, UPDATES, REPEATS = 512, 256, 50, 3
"""Networks on a GPU, updates of an epoch, and epochs of which the fastest counts."""
KERNELS = 15


def some_networks(sizes: NetworkSizes, count: int) -> Batch:
    """Networks with weights of the size of an initialisation."""
    flat = 0.2 * torch.randn(count, sizes.num_weights, generator=torch.Generator().manual_seed(0))
    return Batch.of(sizes.to_named(flat))


def cpu_seconds() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def fastest(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Smallest CPU time of each implementation; they take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for repetition in range(1 + REPETITIONS):
        for name, way in ways.items():
            start = cpu_seconds()
            way()
            if repetition:
                best[name] = min(best[name], cpu_seconds() - start)
    return best


def measure(task: str) -> dict[str, Any]:
    """CPU time on networks of the paper's size for one task."""
    sizes = NetworkSizes.of(KNOWN_TASKS[task])
    network = some_networks(sizes, NETWORKS)
    if problem := why_not(network.views):
        raise SystemExit(problem)
    tokens = min(sizes.tokens, MAX_TOKENS)
    x = torch.randn(PROBES, tokens, sizes.patch or sizes.d_model, requires_grad=True)
    positions = sizes.positions()[:tokens]

    def in_c(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return native_network.probe_outputs(network.views, *inputs)

    def in_torch(*inputs: Tensor) -> ProbeOutputs:
        with mock.patch.object(native_network, "fits", return_value=False):
            return probe_outputs(network, *inputs)

    def there(outputs: Callable[..., tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            outputs(x, positions)

    def and_back(
        outputs: Callable[..., tuple[Tensor, Tensor]], kept: int = probing.MOST_KEPT
    ) -> None:
        with mock.patch.object(probing, "MOST_KEPT", kept):
            logits, _ = outputs(x, positions)
        logits.sum().backward()

    times = fastest(
        {
            "forward, native": lambda: there(in_c),
            "forward, PyTorch": lambda: there(in_torch),
            "both, native": lambda: and_back(in_c),
            "both, native, nothing kept": lambda: and_back(in_c, 0),
            "both, PyTorch": lambda: and_back(in_torch),
        },
    )
    per_million = 1e6 / (NETWORKS * PROBES)
    return {"task": task, "tokens": tokens} | {k: v * per_million for k, v in times.items()}


def lines(row: dict[str, Any]) -> str:
    """A row as text."""
    out = [f"{row['task']}, {row['tokens']} tokens: CPU-seconds per million pairs"]
    for what in ("forward", "both"):
        plain = row[f"{what}, PyTorch"]
        for name, seconds in row.items():
            if name.startswith(what):
                out.append(f"  {name:28} {seconds:7.1f}   {plain / seconds:5.2f}x")
    return "\n".join(out)


def random_parts(task: str) -> tuple[Parts, dict[str, Any]]:
    """Random networks of the paper's size on the GPU, and the description of their zoo."""
    sizes = NetworkSizes.of(KNOWN_TASKS[task])

    def part(count: int) -> Dataset:
        columns = {"row": np.arange(count), "run": np.arange(count).astype(str)}
        network, accuracy = some_networks(sizes, count), torch.linspace(0.1, 0.9, count)
        return Dataset(sizes.block_space, network, accuracy, columns, sizes.tokens)

    parts = Parts(part(TRAINING), part(VALIDATION), part(1)).to("cuda")
    return parts, {"architecture": sizes.to_json()}


def seconds(run: Callable[[], object]) -> float:
    """Time until the GPU has done what a call launches."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def updates(
    model: str, task: str, seeds: int, capture: bool
) -> tuple[dict[str, float | str], SeedTrainer]:
    """Time and memory of an update of all seeds."""
    parts, zoo = random_parts(task)
    protocol = replace(Protocol.of(model, zoo=zoo), updates=UPDATES)
    build = predictor_builder(model, parts.train, {})
    torch.cuda.reset_peak_memory_stats()
    each = list(range(seeds))
    trainer = SeedTrainer(build, parts, protocol, each, together=True, capture=capture)
    list(trainer.start())
    trainer.train_epoch()
    plan = trainer.epoch_plan()
    best = min(seconds(lambda: trainer.run_steps(*plan)) for _ in range(REPEATS))
    row: dict[str, float | str] = {
        "task": task, "model": model, "seeds": seeds,
        "steps": "captured" if trainer.graphs and not trainer.graphs.refused else "eager",
        "ms per update": 1e3 * best / UPDATES,
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip
    return row, trainer


def slowest_kernels(trainer: SeedTrainer) -> str:
    """The kernels of ten updates that take longest."""
    batches, rates = trainer.epoch_plan()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        trainer.run_steps(batches[:10], rates[:10])
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    out = [f"  {total / 1e4:.2f} ms of kernels per update, of which"]
    for row in rows[:KERNELS]:
        each = row.self_device_time_total / 1e4
        out.append(f"  {each:7.3f} ms in {row.count / 10:6.1f} × {row.key[:90]}")
    return "\n".join(out)


@torch.no_grad()
def tf32_change(trainer: SeedTrainer) -> float:
    """Largest change of a standardised prediction by products in TF32."""
    module, network = trainer.modules[0].eval(), trainer.inputs[0][1][0]
    exact = module.logits(network)
    with module.stepping(0, 0):
        return float((module.logits(network) - exact).abs().max())


def measure_gpu(tasks: list[str]) -> list[dict[str, float | str]]:
    """Measure and print the updates of all rivals."""
    rows = []
    for task in tasks:
        for model in RIVALS:
            for seeds, capture in ((1, True), (1, False), (3, True)):
                row, trainer = updates(model, task, seeds, capture)
                rows.append(row)
                sys.stdout.write("  ".join(
                    f"{v:.2f} {k}" if isinstance(v, float) else f"{v}" for k, v in row.items()
                ) + "\n")  # fmt: skip
                if seeds == 1 and capture:
                    test = seconds(lambda held=trainer: held.predict(0)) / VALIDATION
                    sys.stdout.write(
                        f"  {1e3 * test:.2f} ms a network in validation, TF32 changes outputs by "
                        f"{tf32_change(trainer):.1e} at most\n{slowest_kernels(trainer)}\n"
                    )
                sys.stdout.flush()
                del trainer
                torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(KNOWN_TASKS))
    parser.add_argument("--threads", type=int, help="PyTorch's and the C code's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.device == "cuda":
        rows: list[dict[str, Any]] = [*measure_gpu(given.tasks or ["mnist", "ag_news"])]
    else:
        rows = []
        for task in given.tasks or ["mnist"]:
            rows.append(measure(task))
            sys.stdout.write(lines(rows[-1]) + "\n")
            sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
