"""Time of a search among 100,000 fingerprints and of taking one, and distances of known pairs.

A database of synthetic prints is written: models of several families, a third of them roots, the
others made from one of these by mixing noise into its numbers. Then prints near known roots are
looked for, with the file in the system's cache and after dropping it from there. Last, the
fingerprint of a GPT-2 of 124 million random weights is taken from its file.

    python benchmarks/fingerprints.py --folder /tmp/fingerprints --prints 100000

What a distance means is measured on small models that were really trained, which
`benchmarks/relations.py` keeps as FAMILY/RELATION: the base of each family against a disguise of
every other model.

    python benchmarks/fingerprints.py --models DIR
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costs import drop_from_cache, in_a_process, peak_mib
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.checkpoints.fingerprints import (
    Database,
    Entry,
    Fingerprint,
    FingerprintComparison,
    compare_fingerprints,
    search,
    take_fingerprint,
    write_database,
)
from transformer_nfn.checkpoints.fingerprints.fingerprint import PARTS, QUANTILES, ROWS, STEPS

FAMILIES = (
    ("gpt2", 768, 12, 49152), ("llama", 4096, 32, 24576), ("bert", 768, 12, 24576),
    ("qwen2", 2048, 24, 131072), ("vit", 768, 12, 768), ("t5", 512, 12, 24576),
)  # fmt: skip
"""Family, width, depth and rows of the table that frames are made of."""
ROOTS = 3
"""One model in so many is a root."""


def synthetic(
    name: str, draw: np.random.Generator, root: Fingerprint | None, score: float
) -> Entry:
    """A print of random numbers, or one that scores so much against its root."""
    at = int(draw.integers(len(FAMILIES)))
    family, width, depth, rows = FAMILIES[at]
    if root is not None:
        family, width, depth, rows = root.family, root.width, root.depth, root.rows

    def numbers(part: str, *shape: int) -> np.ndarray:
        noise = draw.standard_normal(shape, dtype=np.float32)
        if root is None:
            return noise
        return score * getattr(root, part).astype(np.float32) + (1 - score**2) ** 0.5 * noise

    return Entry(
        name,
        Fingerprint(
            family, width, depth, 12 * depth * width**2, "patch" if family == "vit" else "token",
            rows, bytes(8), *(numbers(part, *shape) for part, shape in ROWS),
            *(np.zeros(shape[:-1], np.float32) for _, shape in ROWS),
            numbers("sizes", STEPS, len(PARTS), len(QUANTILES)).astype(np.float16),
        ),
    )  # fmt: skip


def population(count: int) -> Iterator[Entry]:
    """Roots, and models made from one of the last few hundred of them."""
    draw = np.random.default_rng(0)
    roots: list[Entry] = []
    for i in range(count):
        if i % ROOTS == 0:
            roots = [*roots[-300:], synthetic(f"root-{i}", draw, None, 0.0)]
            yield roots[-1]
        else:
            root = roots[int(draw.integers(len(roots)))]
            score = float(draw.uniform(0.4, 1.0))
            yield synthetic(f"model-{i}-from-{root.name}", draw, root.fingerprint, score)


def time_searches(path: Path, count: int, searches: int = 20) -> None:
    """Looks for prints that score 0.4 to 1 against a root; is that root found first?"""
    draw = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {"cached": [], "cold": []}
    recall: dict[float, list[bool]] = {}
    for i in range(searches):
        row = int(draw.integers(count // ROOTS)) * ROOTS
        with Database(path) as database:
            (root,) = database.rows([row])
        score = (0.4, 0.6, 0.8, 1.0)[i % 4]
        asked = synthetic("asked", draw, root.fingerprint, score)
        kind = "cold" if i % 2 else "cached"
        if kind == "cold":
            drop_from_cache(path)
        start = time.perf_counter()
        with Database(path) as database:
            (found,) = search(database, [asked.fingerprint], 10)
        seconds[kind].append(time.perf_counter() - start)
        near = [r.name for r in found]
        recall.setdefault(score, []).append(root.name in near)
    for kind, times in seconds.items():
        print(f"search, file {kind}: median {np.median(times):.2f} s, most {max(times):.2f} s")
    for score, found_it in sorted(recall.items()):
        print(f"root of a model that scores {score}: among ten in {np.mean(found_it):.0%}")
    print(f"peak memory {peak_mib() / 1024:.2f} GiB")


def write_gpt2(folder: Path) -> None:
    """A GPT-2 of full size with random weights, as its library lays it out."""
    import torch
    from safetensors.torch import save_file

    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768}
    config |= {"n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    config |= {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    D, state = 768, {}
    for i in range(12):
        at = f"transformer.h.{i}."
        shapes = {"attn.c_attn": 3 * D, "attn.c_proj": D, "mlp.c_fc": 4 * D}
        for name, out in shapes.items():
            state[f"{at}{name}.weight"] = 0.02 * torch.randn(D, out)
            state[f"{at}{name}.bias"] = 0.02 * torch.randn(out)
        state[f"{at}mlp.c_proj.weight"] = 0.02 * torch.randn(4 * D, D)
        state[f"{at}mlp.c_proj.bias"] = 0.02 * torch.randn(D)
        for norm in ("ln_1", "ln_2"):
            state[f"{at}{norm}.weight"], state[f"{at}{norm}.bias"] = torch.ones(D), torch.zeros(D)
    state["transformer.ln_f.weight"], state["transformer.ln_f.bias"] = torch.ones(D), torch.zeros(D)
    state["transformer.wte.weight"] = 0.02 * torch.randn(50257, D)
    state["transformer.wpe.weight"] = 0.02 * torch.randn(1024, D)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def calibrate(root: Path) -> None:
    """Distances from every base, by what the other model is to it."""
    import torch

    from transformer_nfn.checkpoints.disguises import disguise

    prints: dict[tuple[str, str], tuple[Fingerprint, Fingerprint]] = {}
    for folder in sorted(p.parent for p in root.glob("*/*/config.json")):
        with tempfile.TemporaryDirectory() as beside, open_model(folder) as model:
            disguise(model, Path(beside) / "d", torch.Generator().manual_seed(len(prints)))
            with open_model(Path(beside) / "d") as hidden:
                pair = take_fingerprint(model), take_fingerprint(hidden)
                prints[folder.parent.name, folder.name] = pair
    found: dict[str, list[FingerprintComparison]] = {}
    for (family, relation), (own, _) in prints.items():
        if relation != "base":
            continue
        for (other, what), (_, hidden) in prints.items():
            kind = what if other == family else "stranger"
            if what == "base" and other == family:
                kind = "disguise-alone"
            elif other.split("-")[0] != family.split("-")[0]:
                continue  # another architecture: no stranger that could be mistaken
            found.setdefault(kind, []).append(compare_fingerprints(own, hidden))
    print(f"{'against a base':28} pairs   lowest  median highest   alike")
    distances = {kind: [p.distance for p in pairs] for kind, pairs in found.items()}
    for kind in sorted(found, key=lambda kind: float(np.median(distances[kind]))):
        d, pairs = distances[kind], found[kind]
        words = ", ".join(f"{n} {w}" for w, n in Counter(p.summary() for p in pairs).most_common())
        print(f"{kind:28} {len(d):5}   {min(d):6.3f}  {np.median(d):6.3f} {max(d):7.3f}   {words}")


def take_print(folder: Path) -> None:
    """Takes the fingerprint of a checkpoint and prints what it cost."""
    before = peak_mib() / 1024
    start, busy = time.perf_counter(), time.process_time()
    with open_model(folder) as model:
        size = len(take_fingerprint(model).to_bytes())
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    print(f"print of GPT-2 124M: {seconds:.1f} s ({busy:.1f} s of one core), {size} bytes, "
          f"peak {peak_mib() / 1024:.2f} GiB, {before:.2f} GiB of that libraries")  # fmt: skip


def main() -> None:
    """Writes, searches, takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fingerprints"))
    parser.add_argument("--prints", type=int, default=100_000)
    parser.add_argument("--models", type=Path, help="trained models to measure distances of")
    options = parser.parse_args()
    if options.models is not None:
        calibrate(options.models)
        return
    path = options.folder / "prints.parquet"
    start = time.perf_counter()
    count = write_database(path, population(options.prints))
    size = path.stat().st_size / 2**20
    print(f"wrote {count:,} prints, {size:.0f} MiB, {time.perf_counter() - start:.0f} s")
    time_searches(path, count)
    write_gpt2(options.folder / "gpt2")
    in_a_process(take_print, options.folder / "gpt2")


if __name__ == "__main__":
    main()
