"""Measure time and memory of relating two checkpoints, and of proving that they are the same.

    python benchmarks/checkpoints.py [--json FILE] [--quick | --sizes 124M] [--plot costs.png]
    python benchmarks/checkpoints.py --memory

GPT-2 of 124 M weights (random, as the library initialises it), its disguise and a stranger; one
block of Llama 7B's size in bfloat16; GPT-2s of other sizes for the plot. Each measurement is a
process of its own, so that the memory is that of the process at its peak, PyTorch (about 0.25 GiB)
included; seconds do not count importing it. `--memory` instead compares a bfloat16 Llama of four
blocks of width 2,048 with its disguise: with the system's pages, with glibc keeping freed memory,
and with large pages, as the command line does. Needs the extra `transformers`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from costs import in_a_process, peak_mib
from transformer_nfn.processes import LARGE_PAGES

LIMITS = {
    "related, disguise": (20.0, 1.8),
    "related, strangers": (20.0, 1.8),
    "proved, disguise": (60.0, 2.5),
    "proved, strangers": (60.0, 2.5),
    "one Llama-7B block, bfloat16": (8.0, 3.0),
}
"""Seconds and GiB that must not be exceeded on two cores."""
SIZES = {"14M": (256, 4, 4), "45M": (512, 6, 8), "124M": (768, 12, 12), "355M": (1024, 24, 16)}
"""Width, blocks and heads of the GPT-2s in the plot."""
NARROW = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 4,
}  # fmt: skip
MEMORY = {
    "pages of 4 KiB": {},
    "freed memory kept": dict.fromkeys(
        ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**30)
    ),
    "large pages": {LARGE_PAGES: "1"},
}
"""Environments of a process; the command line uses the last."""
LLAMA_BLOCKS = 32
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
    "num_key_value_heads": 32, "num_hidden_layers": 1, "vocab_size": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def make_gpt2(folder: Path, size: str, seed: int) -> None:
    """A random GPT-2 as the library initialises it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width, blocks, heads = SIZES[size]
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=width, n_layer=blocks, n_head=heads)
    GPT2LMHeadModel(config).save_pretrained(folder)


def make_llama(folder: Path, seed: int, sizes: dict[str, int] | None = None) -> None:
    """A random Llama in bfloat16: by default one block of 7B's size between small embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**LLAMA | (sizes or {}))
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_disguise(source: Path, out: Path, seed: int) -> None:
    """A disguise of condition 10."""
    from transformer_nfn.checkpoints.disguises import disguise
    from transformer_nfn.checkpoints.families import open_model

    with open_model(source) as model:
        disguise(model, out, torch.Generator().manual_seed(seed), condition=10.0)


def relate_files(first: Path, second: Path, prove: bool) -> dict[str, Any]:
    """Seconds, page faults and peak memory of one relation."""
    from transformer_nfn.checkpoints import relate
    from transformer_nfn.checkpoints.families import open_model

    start, work = time.perf_counter(), time.process_time()
    with open_model(first) as A, open_model(second) as B:
        relation = relate(A, B, prove=prove)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - work,
        "system_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_stime,
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        "peak_gib": peak_mib() / 1024,
        "verdict": relation.verdict,
        "same_function": relation.same_function,
    }


def relate_block(first: Path, second: Path) -> dict[str, Any]:
    """Seconds and peak memory of one block alone, and of fitting the stream, which comes once."""
    from transformer_nfn.checkpoints.families import open_model
    from transformer_nfn.checkpoints.reduced import reduce_pair
    from transformer_nfn.checkpoints.sketches import (
        Probes,
        block_score,
        compare_blocks,
        draw_probes,
        sketch_block,
        unit_directions,
    )
    from transformer_nfn.checkpoints.stream import fit_stream

    with open_model(first) as model_A, open_model(second) as model_B:
        A, B = reduce_pair(model_A, model_B, torch.float32)
        start = time.perf_counter()
        fit = fit_stream(A, B)
        stream = time.perf_counter() - start
        drawn = draw_probes(A.description.width, centred=A.centred, dtype=A.dtype)
        moved = Probes(fit.map(drawn.into), fit.map(drawn.out))
        before = peak_mib() / 1024
        start, work = time.perf_counter(), time.process_time()
        a = unit_directions(sketch_block(A.block("0"), drawn))
        parts = compare_blocks(a, unit_directions(sketch_block(B.block("0"), moved)))
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - work,
            "stream_seconds": stream,
            "stream_peak_gib": before,
            "peak_gib": peak_mib() / 1024,
            "score": block_score(parts),
        }


def measure(folder: Path, sizes: list[str], quick: bool) -> dict[str, Any]:
    """Everything, by name."""
    rows: dict[str, Any] = {}
    for size in sizes:
        made = {kind: folder / f"{size}-{kind}" for kind in ("a", "disguise", "b")}
        in_a_process(make_gpt2, made["a"], size, 0)
        in_a_process(make_gpt2, made["b"], size, 1)
        in_a_process(make_disguise, made["a"], made["disguise"], 7)
        for what, prove in (("related", False), ("proved", True)):
            for kind, other in (("disguise", made["disguise"]), ("strangers", made["b"])):
                name = f"{what}, {kind}"
                row = in_a_process(relate_files, made["a"], other, prove)
                rows[f"GPT-2 {size}: {name}"] = row
                show(f"GPT-2 {size}: {name}", row)
        for path in made.values():
            shutil.rmtree(path)
    if not quick:
        paths = folder / "llama-a", folder / "llama-b"
        for seed, path in enumerate(paths):
            in_a_process(make_llama, path, seed)
        name = "one Llama-7B block, bfloat16"
        rows[name] = in_a_process(relate_block, *paths)
        show(name, rows[name])
    return rows


def measure_memory(folder: Path) -> dict[str, Any]:
    """One pair in bfloat16, with each kind of memory."""
    paths = folder / "llama", folder / "disguise"
    in_a_process(make_llama, paths[0], 0, NARROW)
    in_a_process(make_disguise, *paths, 7)
    rows = {}
    for name, variables in MEMORY.items():
        os.environ.update(variables)
        rows[name] = row = in_a_process(relate_files, *paths, True)
        for variable in variables:
            del os.environ[variable]
        show(name, row)
        print(f"{'':42s} {row['system_seconds']:.1f} s in the system, "
              f"{row['page_faults']:,} page faults, {row['verdict']}")  # fmt: skip
    return rows


def show(name: str, row: dict[str, Any]) -> None:
    limit = next((v for k, v in LIMITS.items() if name.endswith(k) and "124M" in name), None)
    limit = LIMITS.get(name, limit)
    limits = "" if limit is None else f"   (at most {limit[0]:g} s, {limit[1]:g} GiB)"
    print(
        f"{name:42s} {row['seconds']:7.1f} s ({row['cpu_seconds']:.1f} s of work) "
        f"{row['peak_gib']:6.2f} GiB{limits}",
        flush=True,
    )


def project(rows: dict[str, Any]) -> dict[str, float]:
    """What a whole Llama 7B would take to relate, from one block of it."""
    block = rows["one Llama-7B block, bfloat16"]
    seconds = LLAMA_BLOCKS * block["seconds"] + block["stream_seconds"]
    return {"seconds": seconds, "peak_gib": block["peak_gib"] + 0.011 * 2 * LLAMA_BLOCKS}


def plot(rows: dict[str, Any], out: Path) -> None:
    """Seconds and memory against the number of weights."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    weights = {"14M": 16.1e6, "45M": 45.2e6, "124M": 124.4e6, "355M": 354.8e6}
    for kind in ("related, disguise", "related, strangers", "proved, disguise"):
        measured = {s: rows[f"GPT-2 {s}: {kind}"] for s in SIZES if f"GPT-2 {s}: {kind}" in rows}
        x = [weights[s] / 1e6 for s in measured]
        left.plot(x, [r["seconds"] for r in measured.values()], marker="o", label=kind)
        right.plot(x, [r["peak_gib"] for r in measured.values()], marker="o", label=kind)
    left.set(xlabel="million weights", ylabel="seconds", ylim=0)
    right.set(xlabel="million weights", ylabel="peak GiB", ylim=0)
    left.legend()
    figure.savefig(out, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--plot", type=Path, help="also draw them here")
    parser.add_argument("--quick", action="store_true", help="the smallest size only")
    parser.add_argument("--memory", action="store_true", help="one pair, by kind of memory")
    parser.add_argument("--sizes", default=",".join(SIZES), help="GPT-2s, separated by commas")
    parser.add_argument("--folder", type=Path, help="for the files; a temporary one otherwise")
    options = parser.parse_args()
    print(f"threads: {torch.get_num_threads()}")
    sizes = ["14M"] if options.quick else options.sizes.split(",")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.memory:
            rows = measure_memory(Path(folder))
        else:
            rows = measure(Path(folder), sizes, options.quick)
    if not (options.quick or options.memory):
        rows["Llama 7B, projected"] = project(rows)
        projected = rows["Llama 7B, projected"]
        print(f"Llama 7B, projected: {projected['seconds']:.0f} s, {projected['peak_gib']:.1f} GiB")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
