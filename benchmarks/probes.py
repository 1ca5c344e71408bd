"""What does it cost to ask networks by probes? The C pass against PyTorch, in one run.

CPU-seconds per million pairs of a network and a probe, all threads together, forward and forward
with the gradient of the probes; of several repetitions taken in turn the fastest counts. CPU time,
not the clock, so that other work on the machine does not matter much.

    python benchmarks/probes.py [--tasks mnist digits …] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from transformer_nfn import native_network
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.models.network import Network, network_of
from transformer_nfn.models.whole_network.probes import ProbeOutputs, probe_outputs
from transformer_nfn.native_network import probing, why_not
from transformer_nfn.zoo import NetworkSizes

NETWORKS, PROBES, REPETITIONS = 32, 64, 5
MAX_TOKENS = 64
"""Most tokens of a probe; a text may have more."""


def some_networks(sizes: NetworkSizes, count: int) -> Network:
    """Networks with weights of the size of an initialisation."""
    flat = 0.2 * torch.randn(count, sizes.num_weights, generator=torch.Generator().manual_seed(0))
    return network_of(sizes.to_named(flat))


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
    if problem := why_not(network):
        raise SystemExit(problem)
    tokens = min(sizes.tokens, MAX_TOKENS)
    x = torch.randn(PROBES, tokens, sizes.patch or sizes.d_model, requires_grad=True)
    positions = sizes.positions()[:tokens]

    def in_torch(*arguments: Any) -> ProbeOutputs:
        with mock.patch.object(native_network, "fits", return_value=False):
            return probe_outputs(*arguments)

    def there(outputs: Callable[..., tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            outputs(network, x, positions)

    def and_back(
        outputs: Callable[..., tuple[Tensor, Tensor]], kept: int = probing.MOST_KEPT
    ) -> None:
        with mock.patch.object(probing, "MOST_KEPT", kept):
            logits, _ = outputs(network, x, positions)
        logits.sum().backward()

    times = fastest(
        {
            "forward, native": lambda: there(native_network.probe_outputs),
            "forward, PyTorch": lambda: there(in_torch),
            "both, native": lambda: and_back(native_network.probe_outputs),
            "both, native, nothing kept": lambda: and_back(native_network.probe_outputs, 0),
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


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["mnist"], choices=list(KNOWN_TASKS))
    parser.add_argument("--threads", type=int, help="PyTorch's and the C code's")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    rows = []
    for task in given.tasks:
        rows.append(measure(task))
        sys.stdout.write(lines(rows[-1]) + "\n")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
