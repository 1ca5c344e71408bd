"""Speed of the paper's model against a literal transcription of its pseudocode.

Both sides in one run, alternating, after warming up; medians. On a CPU: a training step (forward,
backward, Adam) at batch 16 and a forward pass at batch 256. On a GPU also the step captured as a
CUDA graph. The two models have the same parameters and are checked to agree first.

    python benchmarks/nfn.py [--json FILE] [--device cpu|cuda] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "nn"))

from paper_transcription import PaperModel
from phi_mapping import copy_into_paper
from whole_networks import Net, batch_of

from costs import in_a_process, peak_mib
from transformer_nfn.models import TransformerNFN

TRAIN, FORWARD = 16, 256


def build(device: str) -> tuple[TransformerNFN, PaperModel]:
    """The two models on AG News with the same parameters."""
    torch.manual_seed(0)
    ours = TransformerNFN.paper("ag_news")
    paper = PaperModel(32, 2, [10], 1188)
    copy_into_paper(ours, paper)
    return ours.to(device), paper.to(device)


def networks(model: TransformerNFN, batch: int, device: str) -> Net:
    """Random networks of the small transformer zoo."""
    torch.manual_seed(1)
    blocks = [model.space.randn(batch, device=device) for _ in range(2)]
    # The size of trained weights, roughly.
    blocks = [{n: 0.2 * x for n, x in w.items()} for w in blocks]
    return {"blocks": blocks, "classifier": 0.2 * torch.randn(batch, 1188, device=device)}


def training_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, given: Any, target: Tensor
) -> Callable[[], None]:
    def step() -> None:
        optimiser.zero_grad()
        loss = nn.functional.binary_cross_entropy(model(given), target)
        loss.backward()
        optimiser.step()

    return step


def forward_pass(model: nn.Module, given: Any) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(given)

    return run


def captured(step: Callable[[], None], model: nn.Module) -> Callable[[], None]:
    """The step as a CUDA graph; needs an optimiser that is `capturable`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def medians(runs: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of each, taking turns so that a busy machine slows all of them."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 3):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            if turn >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def measure_peak(side: str, what: str) -> float:
    """MiB by which one side raises the peak memory of this process."""
    ours, paper = build("cpu")
    model: nn.Module = ours if side == "our" else paper
    train = what == "step"
    net = networks(ours, TRAIN if train else FORWARD, "cpu")
    given = batch_of(net) if side == "our" else net
    del ours, paper
    optimiser = torch.optim.Adam(model.parameters(), 1e-3, fused=side == "our")
    run = (
        training_step(model, optimiser, given, torch.rand(TRAIN))
        if train
        else forward_pass(model, given)
    )
    # Building the models may have taken more: the kernel starts counting anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_mib()
    for _ in range(3):
        run()
    return peak_mib() - before


def cuda_peak(run: Callable[[], None]) -> float:
    """MiB that a run needs on the GPU beyond what is there already."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def agree(ours: nn.Module, paper: nn.Module, given: Net) -> float:
    """The largest difference of the two predictions; fails if it is not rounding."""
    with torch.no_grad():
        worst = float((ours(batch_of(given)) - paper(given)).abs().max())
    if worst > 1e-3:
        raise SystemExit(f"the two models differ by {worst:.2g}")
    return worst


def benchmark(device: str, rounds: int) -> dict[str, Any]:
    ours, paper = build(device)
    small, large = networks(ours, TRAIN, device), networks(ours, FORWARD, device)
    worst = agree(ours, paper, small)
    target = torch.rand(TRAIN, device=device)
    # Adam with torch's defaults on the literal side; its fused form on ours.
    theirs = torch.optim.Adam(paper.parameters(), 1e-3)
    mine = torch.optim.Adam(ours.parameters(), 1e-3, fused=True, capturable=device == "cuda")
    runs = {
        "literal step": training_step(paper, theirs, small, target),
        "our step": training_step(ours, mine, batch_of(small), target),
        "literal forward": forward_pass(paper, large),
        "our forward": forward_pass(ours, batch_of(large)),
    }
    memory: dict[str, float] = {}
    if device == "cuda":
        for name, run in list(runs.items()):
            memory[name] = cuda_peak(run)
        runs["our step, graph"] = captured(runs["our step"], ours)
        # For fairness the literal side as a graph too, which torch's defaults do not give.
        other = torch.optim.Adam(paper.parameters(), 1e-3, capturable=True)
        again = training_step(paper, other, small, target)
        runs["literal step, graph"] = captured(again, paper)
    else:
        for name in list(runs):
            side, what = name.split()
            memory[name] = in_a_process(measure_peak, side, what)
    times = medians(runs, rounds, device)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in ours.parameters()),
        "largest difference": worst,
        "milliseconds": times,
        "peak MiB": memory,
    }


def report(found: dict[str, Any]) -> str:
    times, memory = found["milliseconds"], found["peak MiB"]
    lines = [
        f"{found['device']}, {found['threads']} threads, torch {found['torch']}; "
        f"{found['parameters']:,} parameters; outputs agree to {found['largest difference']:.1e}",
        "",
        f"{'':36}{'literal':>12}{'ours':>12}{'ratio':>8}",
    ]
    rows = [
        (f"training step, batch {TRAIN} (ms)", "literal step", "our step", times),
        ("the same, ours as CUDA graph (ms)", "literal step", "our step, graph", times),
        ("the same, both as CUDA graphs (ms)", "literal step, graph", "our step, graph", times),
        (f"forward, batch {FORWARD} (ms)", "literal forward", "our forward", times),
        ("peak memory of the step (MiB)", "literal step", "our step", memory),
        ("peak memory of the forward (MiB)", "literal forward", "our forward", memory),
    ]
    for label, theirs, mine, table in rows:
        if mine in table:
            ratio = table[theirs] / table[mine] if table[mine] else float("inf")
            lines.append(f"{label:36}{table[theirs]:12.2f}{table[mine]:12.2f}{ratio:8.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    devices = [options.device] if options.device else ["cpu"]
    if options.device is None and torch.cuda.is_available():
        devices.append("cuda")
    found = {device: benchmark(device, options.rounds) for device in devices}
    for device in devices:
        print(report(found[device]), end="\n\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
