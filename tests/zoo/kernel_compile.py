"""Compile the fused kernels for an H200 without one, and report what each needs of the chip.

As a script it compiles networks of one size (a process of its own, whose Triton launches nothing):

    python tests/zoo/kernel_compile.py mnist w48-h3-d2 bf16 [NAME…]

prints as JSON the shared memory, the registers per thread and the bytes of local memory per thread
(spilled registers) of each kernel, or of the named ones.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo.sizes import NetworkSizes, SizeGroup
from transformer_nfn.zoo.training.kernels.arguments import Clock, Progress
from transformer_nfn.zoo.training.kernels.runner import Pass
from transformer_nfn.zoo.training.tasks import ImageTask, Task, TextTask, WordVectors

NETWORKS, BATCH, STEPS = 16, 128, 10
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDevice:
    """What Triton reads of a GPU before it launches a kernel."""

    def get_current_target(self) -> GPUTarget:
        """An H200."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


def empty_task(name: str, group: SizeGroup) -> Task:
    """A task with samples of the right shapes and no content."""
    known = KNOWN_TASKS[name]
    sizes = NetworkSizes.of(known, group)
    splits = ("train", "held", "test")
    labels = torch.zeros(BATCH, dtype=torch.int64)
    if known.patch:
        images = torch.zeros(BATCH, 32, 32, dtype=torch.uint8)
        return ImageTask(
            name, sizes, dict.fromkeys(splits, images), dict.fromkeys(splits, labels),
            torch.zeros(sizes.tokens * sizes.patch, dtype=torch.int64), white=255, padding=2,
            epochs=1, provenance={},
        )  # fmt: skip
    tokens = torch.zeros(BATCH, sizes.tokens, dtype=torch.int32)
    vectors = torch.zeros(50, sizes.d_model)
    return TextTask(
        name, sizes, tokens=dict.fromkeys(splits, tokens), counts=dict.fromkeys(splits, labels),
        labels=dict.fromkeys(splits, labels), words=WordVectors((), vectors[1:], "test"),
        vectors=vectors, epochs=1, provenance={},
    )  # fmt: skip


def run_pass(task: Task, precision: str) -> None:
    """Launch all kernels of a step in bf16 or tf32, or of the test split in tf32x3."""
    sizes = task.sizes
    train = precision != "tf32x3"

    def words(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    one = Pass(
        task, NETWORKS, BATCH, longest=sizes.tokens, train=train,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        products=precision if precision == "tf32x3" else "tf32",
    )  # fmt: skip
    clock = Clock(
        words(1), words(NETWORKS), words(NETWORKS if train else 1, STEPS * BATCH),
        words(NETWORKS, STEPS), words(STEPS, NETWORKS), words(NETWORKS, STEPS, 2),
        words(NETWORKS, STEPS, sizes.dropout_sites, 2), torch.zeros(NETWORKS, STEPS, 7),
    )  # fmt: skip
    weights, number = torch.zeros(NETWORKS, sizes.num_weights), torch.ones(NETWORKS)
    one.forward(weights, clock, "train" if train else "test", number)
    if train:
        one.draw(clock, words(NETWORKS))
        one.backward(weights, clock, number)
        one.update(weights, Progress(weights, weights, number, number), clock)


def needs(kernel: Any) -> dict[str, int]:
    """Bytes of shared memory, registers per thread and bytes of local memory per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", out))
    return {
        "shared": kernel.metadata.shared,
        "registers": int(found["REG"]),
        "spilled": int(found["STACK"]),
    }


def main() -> None:
    """Compile what the command line names."""
    name, group, precision, *names = sys.argv[1:]
    driver.set_active(NoDevice())
    compile_and_launch = JITFunction.run
    report: dict[str, dict[str, int]] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = self.fn.__name__
        if names and kernel not in names:
            return
        compiled = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        block = f" of block {options['BLOCK']}" if "BLOCK" in options else ""
        report[kernel + block] = needs(compiled)

    JITFunction.run = compile_only
    run_pass(empty_task(name, SizeGroup.from_name(group)), precision)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
