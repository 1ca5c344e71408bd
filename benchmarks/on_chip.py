"""The on-chip kernels beside the fused Triton kernels in one run: MNIST, batch 128, bf16, on CUDA.

Prints the time of each kernel of a step, launched alone, then network-epochs/s of whole epochs (the
median, and the range). ``--profile`` trains an epoch, then launches each on-chip kernel once with
the first step's data; only that is profiled:

    python benchmarks/on_chip.py --data DIR
    ncu --profile-from-start off --clock-control none --set full -o on_chip \
        python benchmarks/on_chip.py --data DIR --profile
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from transformer_nfn.zoo import Recipe, load_task, sample
from transformer_nfn.zoo.training.kernels.arguments import Clock
from transformer_nfn.zoo.training.kernels.on_chip import OnChipPass
from transformer_nfn.zoo.training.kernels.runner import FusedRunner, Pass
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import Training

PARTS = ("forward", "backward_last", "backward_first")


def median_time(work: Callable[[], None], repeats: int = 20) -> float:
    """Milliseconds on the GPU."""
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def training_by(path: str, task: Task, networks: int) -> Training:
    """Training of networks that all see the whole training set."""
    configs = [replace(config, train_fraction=1.0) for config in sample(networks)]
    counts = [task.num_samples["train"]] * networks
    return Training(task, configs, counts, Recipe(100, 128, "bf16"), "cuda", path, torch.float32)


def at_first_step(training: Training) -> tuple[FusedRunner, Pass, Clock]:
    """What launches kernels outside of the captured graph, after an epoch, at its first step."""
    runner = training.runner
    assert isinstance(runner, FusedRunner)
    assert runner.buffers is not None
    assert runner.clock is not None
    runner.clock.step.zero_()
    runner.buffers.draw(runner.clock, runner.threshold)
    return runner, runner.buffers, runner.clock


def kernel_times(path: str, runner: FusedRunner, one: Pass, clock: Clock) -> None:
    """Print the times of a step's kernels, each launched alone."""
    weights, scale = runner.weights, runner.scale
    work: dict[str, Callable[[], None]] = {
        "draw": lambda: one.draw(clock, runner.threshold),
        "forward with classifier": lambda: one.forward(weights, clock, "train", scale),
        "backward": lambda: one.backward(weights, clock, scale),
        "update": lambda: one.update(weights, runner.progress, clock),
    }
    if isinstance(one, OnChipPass):
        work |= {part: functools.partial(one.launch, part, weights, clock, scale) for part in PARTS}
    times = ", ".join(f"{part} {median_time(run):.3f}" for part, run in work.items())
    print(f"{path}, milliseconds: {times}")


def speed(task: Task, networks: int) -> None:
    """Print network-epochs/s and the times of the kernels of both paths."""
    rates: dict[str, list[float]] = {"fused": [], "on-chip": []}
    for _ in range(2):
        for path, found in rates.items():
            training = training_by(path, task, networks)
            for epoch in range(4):
                torch.cuda.synchronize()
                start = time.perf_counter()
                training.train_epoch(epoch)
                torch.cuda.synchronize()
                if epoch:
                    found.append(networks / (time.perf_counter() - start))
            kernel_times(path, *at_first_step(training))
            del training
            torch.cuda.empty_cache()
    fused = statistics.median(rates["fused"])
    for path, found in rates.items():
        rate, spread = statistics.median(found), f"{min(found):.1f} to {max(found):.1f}"
        print(f"{path}: {rate:.1f} network-epochs/s ({spread}) = {rate / fused:.2f}x")


def profile(task: Task, networks: int) -> None:
    """Launch each kernel once between the marks that `ncu --profile-from-start off` waits for."""
    training = training_by("on-chip", task, networks)
    training.train_epoch(0)
    runner, one, clock = at_first_step(training)
    assert isinstance(one, OnChipPass)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for part in PARTS:
        one.launch(part, runner.weights, clock, runner.scale)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the MNIST files")
    parser.add_argument("--networks", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="launch each kernel once, for ncu")
    arguments = parser.parse_args()
    task = load_task("mnist", arguments.data).to("cuda")
    (profile if arguments.profile else speed)(task, arguments.networks)


if __name__ == "__main__":
    main()
