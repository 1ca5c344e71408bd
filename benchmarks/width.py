"""What does a layer cost as networks get wider? Dense and low-rank, D = 32 … 1024.

One equivariant layer on one network of width D (heads of 64, hidden width 4D): parameters, time
of a forward pass, and peak memory. Dense layers have 2D³ parameters for each pair of channels,
so they stop where they no longer fit.

    python benchmarks/width.py [--json FILE] [--plot FILE.svg] [--widths 32 64 …]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from costs import in_a_process, median_seconds, peak_mib
from transformer_nfn import spaces
from transformer_nfn.nn import Equivariant

WIDTHS = (32, 64, 128, 256, 512, 768, 1024)
RANK = 16
IN, OUT = 1, 10
"""Channels of a layer."""
LARGEST = 3e8
"""Parameters beyond which a dense layer is not built (1.2 GB in float32)."""


def block(D: int) -> spaces.WeightSpace:
    """An ordinary block of width D: 12 heads of 64 at 768."""
    heads, size = (D // 64, 64) if D >= 128 else (2, D // 2)
    return spaces.attention_block(D, heads, size, size, 4 * D)


def count(D: int, rank: int | None) -> int:
    """Parameters of a layer, without building it."""
    with torch.device("meta"):
        if rank is None:
            return IN * OUT * (2 * D**3 + 12 * D**2 + 15 * D + 12) + OUT * (2 * D + 2)
        return sum(p.numel() for p in Equivariant(block(D), IN, OUT, rank=rank).parameters())


def measure(D: int, rank: int | None) -> dict[str, float]:
    """Seconds of a forward pass and MiB at its peak, in this process."""
    space = block(D)
    torch.manual_seed(0)
    layer = Equivariant(space, IN, OUT, rank=rank)
    weights = space.randn(1, IN)
    with torch.no_grad():
        seconds = median_seconds(lambda: layer(weights), 3)
    return {"seconds": seconds, "peak MiB": peak_mib()}


def benchmark(widths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for D in widths:
        for kind, rank in (("dense", None), (f"rank {RANK}", RANK)):
            row: dict[str, Any] = {"D": D, "kind": kind, "parameters": count(D, rank)}
            if row["parameters"] <= LARGEST:
                row |= in_a_process(measure, D, rank)
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    head = f"{row['D']:6d}  {row['kind']:10}{row['parameters']:>18,}"
    if "seconds" not in row:
        return f"{head}           –           –"
    return f"{head}{row['seconds']:12.4f}{row['peak MiB']:12.0f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Parameters, seconds and memory against the width, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    panels = ("parameters", "seconds", "peak MiB")
    titles = ("parameters", "forward pass (s)", "peak memory (MiB)")
    for ax, key, title in zip(axes, panels, titles, strict=True):
        for kind, style in (("dense", "o-"), (f"rank {RANK}", "s-")):
            chosen = [(r["D"], r[key]) for r in rows if r["kind"] == kind and key in r]
            ax.loglog(*zip(*chosen, strict=True), style, label=kind)
        ax.set_xlabel("width D")
        ax.set_title(title)
        ax.set_xticks([32, 128, 512, 1024], ["32", "128", "512", "1024"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw them (extra `plot`)")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    options = parser.parse_args()
    print(f"one layer, {IN} → {OUT} channels, one network, {torch.get_num_threads()} threads\n")
    print(f"{'D':>6}  {'':10}{'parameters':>18}{'seconds':>12}{'peak MiB':>12}")
    rows = benchmark(options.widths)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
