"""The kernels of on_chip.cu on a CPU, compiled by g++ with `emulation.h`.

Run as a script with Triton's interpreter, it prints the errors of cases as JSON.
"""

import ctypes
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from kernel_cases import bright_images, compare, moved_apart, sized, slow_runs
from torch import Tensor

from transformer_nfn.zoo import Recipe, SizeGroup, sample
from transformer_nfn.zoo.training.kernels.arguments import Clock
from transformer_nfn.zoo.training.kernels.on_chip import SOURCE, Kernels, OnChipPass, Step
from transformer_nfn.zoo.training.kernels.runner import FusedRunner
from transformer_nfn.zoo.training.randomness import keep_mask
from transformer_nfn.zoo.training.trainer import Training, initial_weights

HEADER = Path(__file__).parent / "emulation.h"


class Emulated:
    """The kernels compiled for the CPU."""

    def __init__(self, defines: tuple[str, ...]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernels.so"
            command = ["g++", "-O0", "-std=c++17", "-shared", "-fPIC", "-w", *defines, "-x", "c++"]
            source = (HEADER.read_text() + SOURCE.read_text()).encode()
            subprocess.run([*command, "-o", library, "-"], input=source, check=True)
            self.library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: tuple[int, int], argument: Step) -> None:
        """Run a kernel."""
        getattr(self.library, f"launch_{name}")(*grid, ctypes.byref(argument))


emulated = functools.cache(Emulated)


class EmulatedPass(OnChipPass):
    """An `OnChipPass` on the CPU."""

    chunk = 8

    def compile(self, defines: tuple[str, ...]) -> Kernels:
        """The kernels for these sizes."""
        return emulated(defines)

    def draw(self, clock: Clock, threshold: Tensor, *, ahead: bool = False) -> None:
        """Draw the dropout masks; the interpreter takes seconds for what this does at once."""
        bits, step = self.next_bits if ahead else self.bits, int(clock.step) + ahead
        bit = 1 << torch.arange(32)
        for site in range(self.network.dropout_sites) if step < clock.drop.shape[1] else ():
            kept = keep_mask(clock.drop[:, step, site], threshold, torch.arange(self.rows), 32)
            bits[:, site, 0] = (kept * bit).sum(-1).to(torch.int32)


def case(what: str, group: SizeGroup) -> dict[str, tuple[float, float]]:
    """Errors of MNIST's sizes, of small images, or of scores whose exponentials are not finite."""
    task = sized(bright_images(8, 2, 0) if what == "small" else bright_images(28, 4, 2), group)
    networks, batch = {"mnist": (2, 11), "small": (8, 40), "large_scores": (2, 3)}[what]
    weights = None
    if what == "large_scores":
        weights = torch.stack([initial_weights(task.sizes, c) for c in sample(networks)])
        for name, view in task.sizes.views(weights).items():
            if name.endswith("W_QKV"):
                view.mul_(30)
    found = compare(
        task, networks=networks, batch=batch, precision="bf16", device="cpu", weights=weights,
        kind=EmulatedPass,
    )  # fmt: skip
    assert found.fused[1].isfinite().all()
    return found.errors(task)


def trained() -> list[float]:
    """Relative error of what an epoch changes in the weights of runs of three, two and one step."""
    task, counts = bright_images(28, 4, 2, n=44), [36, 24, 12]
    runs = slow_runs(len(counts))
    plain, fused = (
        Training(task, runs, counts, Recipe(1, 12), "cpu", "torch", torch.float32) for _ in "ab"
    )
    start = plain.runner.weights.clone()
    threshold = plain.runner.threshold  # type: ignore[attr-defined]
    fused.runner = FusedRunner(task, start.clone(), threshold, "bf16", 12, EmulatedPass)
    plain.train_epoch(0)
    fused.train_epoch(0)
    return moved_apart(start, fused.runner.weights, plain.runner.weights)


def main() -> None:
    """Print the errors of a size for the named cases, or those of a training."""
    size, *cases = sys.argv[1:]
    if size == "training":
        print(json.dumps(trained()))
        return
    print(json.dumps({what: case(what, SizeGroup.from_name(size)) for what in cases}))


if __name__ == "__main__":
    main()
