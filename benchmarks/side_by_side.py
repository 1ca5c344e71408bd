"""Measure processes that read invariants of networks beside each other on one machine.

    python benchmarks/side_by_side.py [--other SRC] [--networks 2048] [--processes 3] [--limit 300]

Each process computes both kinds of invariants of as many random networks of the zoo's size: one
process on one thread, one process on all cores, several on all cores at once. `--other` measures
the source tree of another version in the same run. Seconds include start and imports.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


def read_invariants(networks: int) -> None:
    """Both kinds of invariants, each once."""
    from transformer_nfn.functional import small_transformer
    from transformer_nfn.models import invariant_features, network_of
    from transformer_nfn.models.invariants import space_of
    from transformer_nfn.models.whole_network import whole_invariants

    space = small_transformer(tokens=49, classes=10, patch=4).space
    network = network_of({name: w[:, 0] for name, w in space.randn(networks).items()})
    invariant_features(network, space_of(network))
    whole_invariants(network)


def seconds(source: Path, networks: int, processes: int, threads: int | None, limit: int) -> float:
    """Seconds until the last of the processes has finished; infinite where the limit ends them."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, __file__, "--work", "--networks", str(networks)]
    start = time.perf_counter()
    running = [subprocess.Popen(command, env=environment) for _ in range(processes)]
    try:
        for process in running:
            process.wait(limit - (time.perf_counter() - start))
            assert process.returncode == 0
    except subprocess.TimeoutExpired:
        return float("inf")
    finally:
        for process in running:
            process.kill()
            process.wait()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="the source tree of another version")
    parser.add_argument("--networks", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--limit", type=int, default=300, help="seconds for each measurement")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        read_invariants(options.networks)
        return
    sources = {"this version": SOURCE}
    if options.other is not None:
        sources["the other"] = options.other
    print(f"{options.networks} networks, {os.cpu_count()} cores")
    for name, source in sources.items():
        for what, processes, threads in (
            ("one process, one thread", 1, 1),
            ("one process", 1, None),
            (f"{options.processes} processes", options.processes, None),
        ):
            value = seconds(source, options.networks, processes, threads, options.limit)
            text = f"{value:8.1f} s" if value < float("inf") else f"over {options.limit} s, stopped"
            print(f"{name}: {what:24s} {text}", flush=True)


if __name__ == "__main__":
    main()
