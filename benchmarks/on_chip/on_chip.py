"""CUDA C++ kernels of the training step that keep a sample's activations on the chip.

A prototype beside the Triton kernels of ``transformer_nfn.zoo.training.kernels``; README.md says
how it works. It replaces their forward and backward and uses their dropout masks, classifier and
update.

    python benchmarks/on_chip/on_chip.py --emulate
    python benchmarks/on_chip/on_chip.py --check
    python benchmarks/on_chip/on_chip.py --speed --data DIR
    ncu --profile-from-start off python benchmarks/on_chip/on_chip.py --profile --data DIR

``--emulate`` needs no GPU: g++ compiles the kernels with `emulation.h`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests" / "zoo")]
if "--emulate" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import kernel_cases  # noqa: E402

from transformer_nfn.zoo import Recipe, load_task, sample  # noqa: E402
from transformer_nfn.zoo.training.kernels import runner  # noqa: E402
from transformer_nfn.zoo.training.kernels.arguments import Clock  # noqa: E402
from transformer_nfn.zoo.training.kernels.head import classify  # noqa: E402
from transformer_nfn.zoo.training.randomness import keep_mask  # noqa: E402
from transformer_nfn.zoo.training.tasks import ImageTask, Split  # noqa: E402
from transformer_nfn.zoo.training.trainer import Training, initial_weights, train  # noqa: E402

TritonPass = runner.Pass
# Ways to do the same whose speed is not known yet; kernels.cu says what they change.
VARIANTS = ("LOOP_OVER_PAIRS", "TRANSPOSE_IN_SHARED")
THREADS = {"forward": 512, "backward_first": 384, "backward_middle": 384, "backward_last": 384}


class Step(ctypes.Structure):
    """Argument of every kernel, as in kernels.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "weights", "step", "steps", "order", "crop", "bits", "scale", "images", "table",
            "positions", "dpooled", "kept", "between", "stats", "pooled", "gradients",
        )),
        *((name, ctypes.c_int) for name in (
            "batch", "networks", "max_steps", "samples", "wide", "block",
        )),
        ("white", ctypes.c_float),
    )  # fmt: skip


class Kernels(Protocol):
    """Compiled kernels."""

    def launch(self, name: str, grid: tuple[int, int], step: Step) -> None:
        """Launch a kernel on the current stream."""
        ...


class Emulated:
    """The kernels on the CPU."""

    def __init__(self, defines: tuple[str, ...]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernels.so"
            command = ["g++", "-O0", "-std=c++17", "-shared", "-fPIC", "-w", *defines, "-x", "c++"]
            source = source_of("emulation.h").encode()
            subprocess.run([*command, "-o", library, "-"], input=source, check=True)
            self.library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: tuple[int, int], step: Step) -> None:
        """Run a kernel."""
        getattr(self.library, f"launch_{name}")(*grid, ctypes.byref(step))


class OnGpu:
    """The kernels compiled by NVRTC for the current device."""

    def __init__(self, defines: tuple[str, ...]) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        major, minor = torch.cuda.get_device_capability()
        torch.cuda.current_stream().synchronize()  # there is a context now
        binary = compiled(defines, f"sm_{major}{minor}a")
        self.module = ctypes.c_void_p()
        self._check(self.driver.cuModuleLoadData(ctypes.byref(self.module), binary))
        self.functions: dict[str, ctypes.c_void_p] = {}

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver: {code} {text.value!r}")

    def _function(self, name: str) -> ctypes.c_void_p:
        if name not in self.functions:
            function = ctypes.c_void_p()
            at = ctypes.byref(function)
            self._check(self.driver.cuModuleGetFunction(at, self.module, name.encode()))
            # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self.driver.cuFuncSetAttribute(function, 8, SHARED_BYTES))
            self.functions[name] = function
        return self.functions[name]

    def launch(self, name: str, grid: tuple[int, int], step: Step) -> None:
        """Launch a kernel on the current stream."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(step))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function, size = self._function(name), (*grid, 1, THREADS[name], 1, 1)
        launch = self.driver.cuLaunchKernel
        self._check(launch(function, *size, SHARED_BYTES, stream, arguments, None))


# Nearly all that a block of threads can have (227 KB); there is one on a multiprocessor.
SHARED_BYTES = 230400


def source_of(header: str) -> str:
    """The kernels after `device.cuh` or `emulation.h`."""
    return (HERE / header).read_text() + (HERE / "kernels.cu").read_text()


def nvrtc_library() -> ctypes.CDLL:
    """NVRTC from the library path, from the packages PyTorch depends on, or from CUDA's folder."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    places = [*packages.glob("*/lib/libnvrtc.so.*"), "/usr/local/cuda/lib64/libnvrtc.so"]
    for place in ("libnvrtc.so.13", "libnvrtc.so.12", *places):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(place))
    raise RuntimeError("NVRTC is not installed")


def compiled(defines: tuple[str, ...], architecture: str) -> bytes:
    """Machine code by NVRTC."""
    nvrtc = nvrtc_library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = source_of("device.cuh").encode()
    at = ctypes.byref(program)
    if nvrtc.nvrtcCreateProgram(at, source, b"kernels.cu", 0, None, None):
        raise RuntimeError("NVRTC could not be started")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *defines]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


@functools.cache
def kernels(defines: tuple[str, ...], cuda: bool) -> Kernels:
    """The kernels for these sizes."""
    return OnGpu(defines) if cuda else Emulated(defines)


class OnChipPass(TritonPass):
    """A `Pass` whose forward and backward in training are the kernels of kernels.cu.

    Attributes:
        chunk: samples whose weight gradient a block of threads sums; the classifier's kernel has
            as many, and would spill registers with 128.
        variants: those of `VARIANTS` that are compiled in.
    """

    chunk = 64
    variants: tuple[str, ...] = ()

    def __init__(self, task: Any, networks: int, batch: int, **options: Any) -> None:
        super().__init__(task, networks, batch, **options)
        self.train = options["train"]
        if not self.train:
            return
        sizes, device = self.network, self.device
        fits = isinstance(task, ImageTask) and sizes.tokens <= 56 and sizes.patch <= 16
        if not fits or (sizes.d_model, sizes.heads) != (32, 2):
            raise ValueError(
                "the kernels are for images of at most 56 patches of 16 pixels, width 32, 2 heads"
            )
        self.chunks = -(-batch // self.chunk)
        self.constants = self.constants._replace(S=self.chunk)
        self.outcome = self.outcome._replace(
            loss=torch.zeros(self.chunks, networks, device=device),
            hits=torch.zeros(self.chunks, networks, device=device),
        )
        gradients = torch.empty(self.chunks, networks, sizes.num_weights, device=device)
        self.gradients = self.gradients._replace(weights=gradients)
        self.table = task.pattern.to(torch.int32).contiguous()
        rows = -(-sizes.tokens // 8) * 8
        self.kept, self.between = (
            torch.empty(networks, batch, count, rows * 16, dtype=torch.int32, device=device)
            for count in (3 * sizes.blocks + 1, 1)
        )
        stats = (sizes.heads + 2) * sizes.blocks + 1
        self.stats = torch.empty(networks, batch, stats, -(-rows // 32) * 32, device=device)
        defines = {
            "TOKENS": sizes.tokens, "PATCH": sizes.patch, "PADDING": task.padding,
            "CLASSES": sizes.classes, "BLOCKS": sizes.blocks, "CHUNK": self.chunk,
        }  # fmt: skip
        texts = (
            *(f"-D{name}={value}" for name, value in defines.items()),
            *(f"-D{name}" for name in self.variants),
        )
        self.kernels = kernels(texts, device.type == "cuda")

    def _step(self, weights: Tensor, clock: Clock, scale: Tensor, block: int = 0) -> Step:
        sizes, samples = self._sizes(clock), self._samples("train")
        tensors = dict(
            weights=weights, step=clock.step, steps=clock.steps, order=clock.order,
            crop=clock.crop, bits=self.bits, scale=scale, images=samples.stored,
            table=self.table, positions=samples.positions, dpooled=self.gradients.pooled,
            kept=self.kept, between=self.between, stats=self.stats, pooled=self.outcome.pooled,
            gradients=self.gradients.weights,
        )  # fmt: skip
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        return Step(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            batch=self.batch, networks=self.networks, max_steps=sizes.steps,
            samples=sizes.samples, wide=samples.wide, block=block, white=samples.white,
        )  # fmt: skip

    def launch(
        self, name: str, weights: Tensor, clock: Clock, scale: Tensor, block: int = 0
    ) -> None:
        """Launch one kernel."""
        step = self._step(weights, clock, scale, block)
        self.kernels.launch(name, (self.networks, self.chunks), step)

    def draw(self, clock: Clock, threshold: Tensor, *, ahead: bool = False) -> None:
        """Draw the dropout masks of the step, or those of the next."""
        if self.device.type == "cuda":
            super().draw(clock, threshold, ahead=ahead)
            return
        # The interpreter takes seconds for what this does at once.
        bits, step = self.next_bits if ahead else self.bits, int(clock.step) + ahead
        bit = 1 << torch.arange(32)
        if step < clock.drop.shape[1]:
            for site in range(self.network.dropout_sites):
                key = clock.drop[:, step, site]
                kept = keep_mask(key, threshold, torch.arange(self.rows), 32)
                bits[:, site, 0] = (kept * bit).sum(-1).to(torch.int32)

    def forward(
        self, weights: Tensor, clock: Clock, split: Split, scale: Tensor, limit: int = 2**30
    ) -> None:
        """Compute each chunk's loss and hits."""
        if not self.train:
            super().forward(weights, clock, split, scale, limit)
            return
        self.launch("forward", weights, clock, scale)
        classify[(self.networks, self.chunks)](
            self.outcome, self.gradients, weights, clock, self._samples(split),
            self._sizes(clock), limit, self.constants, num_warps=8,
        )  # fmt: skip

    def backward(self, weights: Tensor, clock: Clock, scale: Tensor) -> None:
        """Gradient of the weights, from the gradient of the mean token that `forward` stored."""
        last = self.network.blocks - 1
        for block in reversed(range(last + 1)):
            name = "first" if block == 0 else "last" if block == last else "middle"
            self.launch(f"backward_{name}", weights, clock, scale, block)


def errors(
    kind: type[TritonPass], task: ImageTask, networks: int, batch: int, noise: float, device: str
) -> tuple[dict[str, tuple[float, float]], Tensor]:
    """Errors of a `Pass` and of bf16 autocast against float64 by tensor, and the gradients."""
    kernel_cases.Pass = kind  # type: ignore[misc]
    found = kernel_cases.compare(
        task, networks=networks, batch=batch, precision="bf16", device=device, noise=noise
    )
    return found.errors(task), found.fused[1]


def emulate() -> bool:
    """Print the errors of the emulated kernels; whether they are right, and so are variants."""
    OnChipPass.chunk = 8
    task = kernel_cases.bright_images(28, 4, 2)
    found, gradients = errors(OnChipPass, task, networks=2, batch=11, noise=0.1, device="cpu")
    for name, (ours, plain) in found.items():
        print(f"{name:16} {ours:9.5f}, autocast {plain:9.5f}")
    # Rounding to bf16 gives 0.025 at most; leaving out the last token of 49, 0.058.
    good = found["loss"][0] < 1e-3 and all(ours < 0.04 for ours, _ in found.values())
    good &= bool(gradients.isfinite().all())

    # Scores whose exponentials are not finite.
    weights = torch.stack([initial_weights(task.sizes, config) for config in sample(2)])
    for name, view in task.sizes.views(weights).items():
        if name.endswith("W_QKV"):
            view.mul_(30)
    large = kernel_cases.compare(
        task, networks=2, batch=3, precision="bf16", device="cpu", weights=weights
    )
    loss = large.errors(task)["loss"][0]
    print(f"large scores: loss {loss:.5f}")
    good &= loss < 0.02 and bool(large.fused[1].isfinite().all())

    OnChipPass.variants = VARIANTS
    _, again = errors(OnChipPass, task, networks=2, batch=11, noise=0.1, device="cpu")
    equal = torch.equal(gradients, again)
    print(f"variants equal: {equal}")
    return good and equal


def variant(name: str) -> type[OnChipPass]:
    """`OnChipPass` with variants, named as ``A+B``."""
    return type("Variant", (OnChipPass,), {"variants": tuple(name.split("+"))})


def check(named: list[str]) -> bool:
    """Compare errors with those of Triton and autocast, and two runs and variants bit by bit."""
    good = True
    task = kernel_cases.bright_images(28, 4, 2)
    for batch, noise in ((128, 0.1), (128, 0.0), (100, 0.1)):
        found, gradients = errors(OnChipPass, task, 64, batch, noise, "cuda")
        triton, _ = errors(TritonPass, task, 64, batch, noise, "cuda")
        _, again = errors(OnChipPass, task, 64, batch, noise, "cuda")
        print(f"batch {batch}, noise {noise}: error against float64")
        print(f"{'':16} {'on chip':>9} {'Triton':>9} {'autocast':>9} {'ratio':>6}")
        for name, (ours, plain) in found.items():
            ratio = ours / plain
            print(f"{name:16} {ours:9.5f} {triton[name][0]:9.5f} {plain:9.5f} {ratio:6.3f}")
            good &= ratio <= 1.2
        equal = torch.equal(gradients, again)
        print(f"two runs equal: {equal}")
        good &= equal
        for name in named:
            _, others = errors(variant(name), task, 64, batch, noise, "cuda")
            equal = torch.equal(gradients, others)
            print(f"{name} equal: {equal}")
            good &= equal
    runner.Pass = OnChipPass  # type: ignore[misc]
    recipe = Recipe(epochs=2, batch=32, precision="bf16")
    first, second = (
        train(task, sample(6), recipe, device="cuda", path="fused").weights for _ in range(2)
    )
    equal = torch.equal(first, second)
    print(f"two trainings equal: {equal}")
    return good and equal


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


def images(data: str | None) -> ImageTask:
    """MNIST from a folder, or random images, on the GPU."""
    if data is None:
        return kernel_cases.bright_images(28, 4, 2, n=60000).to("cuda")
    task = load_task("mnist", data).to("cuda")
    assert isinstance(task, ImageTask)
    return task


def training_by(kind: type[TritonPass], task: ImageTask, networks: int) -> Training:
    """Training of networks by a `Pass`."""
    runner.Pass = kind  # type: ignore[misc]
    configs = [replace(config, train_fraction=1.0) for config in sample(networks)]
    counts = [task.num_samples["train"]] * networks
    recipe = Recipe(100, 128, "bf16")
    return Training(task, configs, counts, recipe, "cuda", "fused", torch.float32)


def at_first_step(training: Training) -> tuple[runner.FusedRunner, TritonPass, Clock]:
    """What launches kernels outside of the captured graph, after an epoch, at its first step."""
    now = training.runner
    assert isinstance(now, runner.FusedRunner)
    assert now.buffers is not None
    assert now.clock is not None
    now.clock.step.zero_()
    now.buffers.draw(now.clock, now.threshold)
    return now, now.buffers, now.clock


def speed(networks: int, data: str | None, named: list[str]) -> None:
    """Network-epochs per second of Triton, on chip and ``named`` variants; times of the kernels."""
    task = images(data)
    kinds = {"Triton": TritonPass, "on chip": OnChipPass} | {name: variant(name) for name in named}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(2):
        for name, kind in kinds.items():
            training = training_by(kind, task, networks)
            for epoch in range(4):
                torch.cuda.synchronize()
                start = time.perf_counter()
                training.train_epoch(epoch)
                torch.cuda.synchronize()
                if epoch:
                    rates[name].append(networks / (time.perf_counter() - start))
            kernel_times(name, *at_first_step(training))
            del training
            torch.cuda.empty_cache()
    triton = statistics.median(rates["Triton"])
    for name, found in rates.items():
        rate, spread = statistics.median(found), f"{min(found):.1f} to {max(found):.1f}"
        print(f"{name}: {rate:.1f} network-epochs/s ({spread}), {rate / triton:.2f} of Triton")


def profile(networks: int, data: str | None) -> None:
    """Launch each kernel once between the marks that `ncu --profile-from-start off` waits for."""
    training = training_by(OnChipPass, images(data), networks)
    training.train_epoch(0)
    now, one, clock = at_first_step(training)
    assert isinstance(one, OnChipPass)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for kernel in ("forward", "backward_last", "backward_first"):
        one.launch(kernel, now.weights, clock, now.scale)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def kernel_times(name: str, now: runner.FusedRunner, one: TritonPass, clock: Clock) -> None:
    """Print the times of a step's kernels, each launched alone."""
    work: dict[str, Callable[[], None]] = {
        "draw": lambda: one.draw(clock, now.threshold),
        "forward with classifier": lambda: one.forward(now.weights, clock, "train", now.scale),
        "backward": lambda: one.backward(now.weights, clock, now.scale),
        "update": lambda: one.update(now.weights, now.progress, clock),
    }
    if isinstance(one, OnChipPass):
        for kernel in ("forward", "backward_last", "backward_first"):
            work[kernel] = functools.partial(one.launch, kernel, now.weights, clock, now.scale)
    times = ", ".join(f"{part} {median_time(run):.3f}" for part, run in work.items())
    print(f"{name}, milliseconds: {times}")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--emulate", action="store_true", help="errors on the CPU, emulated")
    ways.add_argument("--check", action="store_true", help="errors and equal bits on a GPU")
    ways.add_argument("--speed", action="store_true", help="network-epochs/s beside Triton")
    ways.add_argument("--profile", action="store_true", help="launch each kernel once, for ncu")
    parser.add_argument("--networks", type=int, default=256)
    parser.add_argument(
        "--variants", default="", help=f"to check or time too, as A,B,A+B; of {', '.join(VARIANTS)}"
    )
    parser.add_argument("--data", help="folder of MNIST's files; else random images")
    arguments = parser.parse_args()
    named = [name for name in arguments.variants.split(",") if name]
    if not {part for name in named for part in name.split("+")} <= set(VARIANTS):
        parser.error(f"variants are {', '.join(VARIANTS)}")
    if arguments.speed:
        speed(arguments.networks, arguments.data, named)
    elif arguments.profile:
        profile(arguments.networks, arguments.data)
    elif not (emulate() if arguments.emulate else check(named)):
        sys.exit("errors are too large or runs differ")


if __name__ == "__main__":
    main()
