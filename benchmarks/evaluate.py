"""How many networks a second do `tnfn predict` and `tnfn evaluate` read, on which device?

The wall time of whole commands, imports and reading of the zoo included. The zoo is synthetic:
rows of a sample repeated with a little noise, so that none has to be built. A slow device gets
fewer networks; ratios are those of networks per second.

    python benchmarks/evaluate.py [--devices cuda:16000 cpu:160] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.store import Folder, write_shard

SHARD = 1000
NOISE = 0.01
"""Relative noise, by which repeated rows differ."""
WRITTEN_ANEW = ("format", "kind", "made_by", "architecture", "space", "plan")


def write_zoo(sample: Zoo, count: int, out: Path) -> None:
    """Write ``count`` rows of a sample, repeated with noise; more rows begin with fewer."""
    fields = {k: v for k, v in sample.metadata.items() if k not in WRITTEN_ANEW}
    starts = range(0, count, SHARD)
    fields |= {"origin": "import", "seeds": "each", "runs": count, "shards": len(starts)}
    folder = Folder.create(out, sample.sizes, fields)
    flat = sample.batch(range(len(sample))).weights
    source = torch.Generator().manual_seed(0)
    for shard, start in zip(folder.shards, starts, strict=True):
        numbers = range(start, min(start + SHARD, count))
        noise = torch.randn(SHARD, flat.shape[1], generator=source)[: len(numbers)]
        weights = flat[[i % len(sample) for i in numbers]] * (1 + NOISE * noise)
        rows = [{**sample.config(i % len(sample)), "run": f"{i:05d}", "seed": i} for i in numbers]
        path, layout = folder.shard_path(shard), sample.sizes.row_layout
        write_shard(path, layout, weights, rows, {}, folder.dtype)
    folder.merge()


def timed(*words: object) -> tuple[float, Any]:
    """Seconds that a command of `tnfn` takes, and its JSON output."""
    command = [sys.executable, "-m", "transformer_nfn", *map(str, words), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, json.loads(done.stdout)


def measure(zoos: dict[str, Path]) -> list[dict[str, Any]]:
    """Both commands on every device, one after another."""
    rows, first = [], {}
    predicted: dict[str, list[float]] = {}
    for device, zoo in zoos.items():
        for command in ("evaluate", "predict"):
            seconds, out = timed(command, "mnist-whole", zoo, "--device", device)
            count = out["networks"] if command == "evaluate" else len(out)
            rate = count / seconds
            ratio = first.setdefault(command, rate) / rate
            row = {"command": command, "device": device, "networks": count, "seconds": seconds,
                   "networks/s": rate, "times slower": ratio}  # fmt: skip
            if command == "predict":
                predicted[device] = [p["value"] for p in out]
                reference = next(iter(predicted.values()))
                pairs = zip(predicted[device], reference, strict=False)
                row["largest difference"] = max(abs(a - b) for a, b in pairs)
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    return rows


def main() -> None:
    """Make the zoos, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ["cpu:160"] if not torch.cuda.is_available() else ["cuda:16000", "cpu:160"]
    parser.add_argument("--devices", nargs="+", default=default, metavar="DEVICE:NETWORKS")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sample = Zoo.open("mnist-sample")
    with TemporaryDirectory() as folder:
        zoos = {}
        for text in given.devices:
            device, _, count = text.partition(":")
            zoos[device] = Path(folder) / device
            write_zoo(sample, int(count), zoos[device])
        rows = measure(zoos)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
