"""Runs damaged inputs through every command and counts what went wrong.

``python tests/fuzz/fuzz.py --inputs 5000`` repeats the nightly run, ``--only 1234`` one input.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"


def run(seed: int, numbers: range, folder: Path) -> list[dict[str, Any]]:
    """The results of the inputs with these numbers, by one worker process."""
    words = [sys.executable, str(HERE / "fuzz_worker.py"), str(folder / "fuzz"), str(seed)]
    words += [str(numbers.start), str(numbers.stop)]
    paths = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
    cache = {
        "TNFN_CACHE": str(folder / "cache"),
        "MPLCONFIGDIR": str(folder / "figures"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "HF_HOME": "home",  # below the folder of each input
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths, **cache}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the worker ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def explain(result: dict[str, Any]) -> str:
    """What went wrong with one input, and how to see it again."""
    told = result["stderr"].strip().splitlines()[-1:] or [result["stdout"].strip()[-200:]]
    text = (
        f"#{result['number']} {result['fault']}: tnfn {shlex.join(result['words'])[:200]}\n"
        f"    {result['damage']} {result['streams'] or ''}; right: {result['right']}; status "
        f"{result['status']} after {result['seconds']} s {result['writes'] or result['left'] or ''}"
        f"\n    {told[0][:400]}"
    )
    return text.encode(errors="backslashreplace").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, help="this input alone")
    asked = parser.parse_args()
    ends = [i * asked.inputs // asked.workers for i in range(asked.workers + 1)]
    parts = [range(*pair) for pair in pairwise(ends)]
    if asked.only is not None:
        parts = [range(asked.only, asked.only + 1)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(parts)) as pool:
        folders = [Path(scratch) / str(i) for i in range(len(parts))]
        found = list(pool.map(run, [asked.seed] * len(parts), parts, folders))
    results = [result for part in found for result in part]
    wrong = [result for result in results if result["fault"]]
    for result in wrong if asked.only is None else results:
        print(explain(result))
    statuses = Counter(str(result["status"]) for result in results)
    print(
        f"{len(results)} inputs, {len(wrong)} faults {dict(Counter(r['fault'] for r in wrong))}; "
        f"exit codes {dict(statuses)}; longest {max(r['seconds'] for r in results)} s"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
