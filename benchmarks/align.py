"""Measure how far alignment lowers the barrier on the straight line between two networks.

    python benchmarks/align.py zoo --data MNIST --pairs 50 --out zoo.json
    python benchmarks/align.py gpt2 --work DIR --out gpt2.json
    python benchmarks/align.py draw zoo.json gpt2.json --figure docs/align.png

``zoo`` takes pairs of networks of `mnist-sample` and MNIST's test images. ``gpt2`` trains two small
GPT-2s from different seeds on the standard library's source, byte by byte, and takes held-out
files. The barrier is the largest excess over the straight line between the two ends.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment import align
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.networks import zoo_rows
from transformer_nfn.zoo import Zoo, load_task

POINTS = 7
TEST_IMAGES, UNLABELLED, ROUNDS, ACCURACY = 400, 128, 50, 0.85
BLOCK, BATCH, STEPS = 64, 16, 1500


def line(
    A: Mapping[str, Tensor], B: Mapping[str, Tensor], measure: Callable[[Mapping[str, Tensor]], Any]
) -> np.ndarray:
    """Measurements at `POINTS` places from A to B, ``[POINTS, measures]``."""
    places = np.linspace(0, 1, POINTS)
    return np.array(
        [measure({n: (1 - t) * A[n].double() + t * B[n].double() for n in A}) for t in places]
    )


def barrier(curve: np.ndarray) -> np.ndarray:
    """The largest excess over the straight line between the ends, per measure."""
    t = np.linspace(0, 1, len(curve))[:, None]
    return (curve - ((1 - t) * curve[0] + t * curve[-1])).max(0)


def zoo_pairs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Pairs of networks of `mnist-sample`, drawn at random among the better ones."""
    zoo = Zoo.open("mnist-sample")
    task = load_task("mnist", arguments.data)
    samples = task.num_samples["test"]
    picked = torch.arange(0, samples, samples // TEST_IMAGES)[None]
    test = task.batch("test", picked)
    unlabelled = task.batch("train", torch.arange(UNLABELLED)[None]).inputs[0]

    def measure(weights: Mapping[str, Tensor]) -> tuple[float, float]:
        out = transformer(config, {n: w.float() for n, w in weights.items()}, test.inputs[0])
        loss = torch.nn.functional.cross_entropy(out, test.labels[0])
        return float(loss), float((out.argmax(-1) != test.labels[0]).float().mean())

    rows, rng = zoo.select(min_accuracy=ACCURACY), np.random.default_rng(0)
    results = []
    for number in range(arguments.pairs):
        i, j = (int(r) for r in rng.choice(rows, 2, replace=False))
        models = [network.open_model() for network in zoo_rows(zoo, (i, j))]
        assert models[0] is not None
        assert models[1] is not None
        config = models[0].description
        A, B = (model.read(model.names) for model in models if model is not None)
        start = time.perf_counter()
        moved = align(models[0], models[1], inputs=unlabelled, rounds=ROUNDS)
        took = time.perf_counter() - start
        assert moved.tensors is not None
        before, after = line(A, B, measure), line(moved.tensors, B, measure)
        outputs = [transformer(config, w, test.inputs[0].double(), dtype=torch.float64)
                   for w in (A, moved.tensors)]
        results.append(
            {
                "pair": [i, j],
                "distance": [moved.before, moved.after],
                "difference": float((outputs[1] - outputs[0]).norm() / outputs[0].norm()),
                "seconds": took,
                "loss": [before[:, 0].tolist(), after[:, 0].tolist()],
                "error": [before[:, 1].tolist(), after[:, 1].tolist()],
                "barrier_loss": [float(barrier(c)[0]) for c in (before, after)],
                "barrier_error": [float(barrier(c)[1]) for c in (before, after)],
            }
        )
        shown = {k: v for k, v in results[-1].items() if k not in ("loss", "error")}
        print(number, shown, flush=True)
        arguments.out.write_text(json.dumps({"pairs": results}))
    return {"pairs": results}


def source_text() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's modules; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: list[list[bytes]] = [[], []]
    for number, file in enumerate(files):
        parts[number % 10 == 0].append(file.read_bytes())
    train, test = (torch.tensor(list(b"".join(p)), dtype=torch.long) for p in parts)
    return train, test


def train_gpt2(folder: Path, seed: int) -> None:
    """A small untied GPT-2 trained on source, written as its library writes it."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=3, n_positions=BLOCK, vocab_size=256, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    text, _ = source_text()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=STEPS)
    draw = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    start = time.process_time()
    for _ in range(STEPS):
        at = torch.randint(0, len(text) - BLOCK - 1, (BATCH,), generator=draw)
        batch = text[at.unsqueeze(-1) + torch.arange(BLOCK)]
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.save_pretrained(folder)
    print(f"seed {seed}: loss {float(loss.detach()):.3f}, {time.process_time() - start:.0f} s")


def gpt2_pair(work: Path) -> dict[str, Any]:
    """Two GPT-2s of different seeds, before and after."""
    for seed in (0, 1):
        if not (work / str(seed)).exists():
            train_gpt2(work / str(seed), seed)
    _, text = source_text()
    draw = torch.Generator().manual_seed(9)
    at = torch.randint(0, len(text) - BLOCK - 1, (32,), generator=draw)
    ids = text[at.unsqueeze(-1) + torch.arange(BLOCK)]
    with open_model(work / "0") as A, open_model(work / "1") as B:
        start = time.perf_counter()
        moved = align(A, B)
        took = time.perf_counter() - start
        first, second = (m.read(m.names, torch.float64) for m in (A, B))
        assert moved.tensors is not None
        description = B.description

        def measure(weights: Mapping[str, Tensor]) -> tuple[float, float]:
            out = transformer(description, weights, ids)[:, :-1].flatten(0, 1)
            right = ids[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(out, right)
            return float(loss), float((out.argmax(-1) != right).float().mean())

        curves = [line(w, second, measure) for w in (first, moved.tensors)]
    return {
        "distance": [moved.before, moved.after],
        "rounds": moved.rounds,
        "seconds": took,
        "loss": [c[:, 0].tolist() for c in curves],
        "error": [c[:, 1].tolist() for c in curves],
        "barrier_loss": [float(barrier(c)[0]) for c in curves],
        "barrier_error": [float(barrier(c)[1]) for c in curves],
    }


def draw(zoo: dict[str, Any], gpt2: dict[str, Any], figure: Path) -> None:
    """Barriers of all pairs before against after, and the line between the two GPT-2s."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = page.subplots(1, 3)
    pairs = np.array([p["barrier_error"] for p in zoo["pairs"]])
    left.scatter(pairs[:, 0], pairs[:, 1], s=14, color="C0")
    top = float(pairs.max()) * 1.05
    left.plot([0, top], [0, top], color="0.6", lw=0.8)
    lower = int((pairs[:, 1] < pairs[:, 0]).sum())
    left.set(
        xlabel="error barrier before", ylabel="error barrier after", xlim=(0, top), ylim=(0, top)
    )
    left.set_title(f"two zoo networks: lower for {lower} of {len(pairs)}", loc="left", fontsize=9)
    t = np.linspace(0, 1, POINTS)
    for k, colour in enumerate(("0.6", "C0")):
        curves = np.array([p["error"][k] for p in zoo["pairs"]])
        middle.plot(t, curves.T, color=colour, lw=0.3, alpha=0.4)
        middle.plot(t, curves.mean(0), color=colour, lw=2, label=("before", "after")[k])
        right.plot(t, gpt2["loss"][k], color=colour, lw=2, label=("before", "after")[k])
    middle.set(xlabel="from A to B", ylabel="test error")
    middle.set_title("on the straight line, and the mean", loc="left", fontsize=9)
    right.set(xlabel="from A to B", ylabel="loss on held-out source (nats per byte)")
    right.set_title("two GPT-2s of different seeds", loc="left", fontsize=9)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    middle.legend(frameon=False)
    page.savefig(figure, dpi=130)


def main() -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    zoo = commands.add_parser("zoo")
    zoo.add_argument("--data", type=Path, help="MNIST's files; fetched if not given")
    zoo.add_argument("--pairs", type=int, default=50)
    zoo.add_argument("--out", type=Path, required=True)
    gpt2 = commands.add_parser("gpt2")
    gpt2.add_argument("--work", type=Path, required=True)
    gpt2.add_argument("--out", type=Path, required=True)
    picture = commands.add_parser("draw")
    picture.add_argument("results", type=Path, nargs=2)
    picture.add_argument("--figure", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw(*(json.loads(p.read_text()) for p in arguments.results), arguments.figure)
        return
    if arguments.command == "zoo":
        results = zoo_pairs(arguments)
        for name in ("barrier_loss", "barrier_error"):
            both = np.array([p[name] for p in results["pairs"]])
            lower = int((both[:, 1] < both[:, 0]).sum())
            means = both.mean(0)
            print(f"{name}: {means[0]:.3f} → {means[1]:.3f}, lower for {lower} of {len(both)}")
    else:
        results = gpt2_pair(arguments.work)
        print({k: v for k, v in results.items() if k not in ("loss", "error")})
    arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
