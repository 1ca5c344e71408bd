"""How many labelled examples a Kendall's tau is worth: simulated, and from answers per example.

`worth_in_examples` draws the accuracy measured on k examples from each network's true one, as if
every network had examples of its own. Here the networks of a zoo answer the same test examples, of
which k are drawn, and the rest says how accurate they are:

    python benchmarks/worth.py ZOO [--data DIR] [--examples 4000] [--out ANSWERS.npy]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from transformer_nfn.prediction.metrics import EXAMPLES, kendall_tau, worth_in_examples
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.training.tasks.load import load_task

DRAWS = 40
CHUNK = 500


@torch.no_grad()
def answers(zoo: Zoo, data: Path | None, examples: int) -> np.ndarray:
    """Whether each network ``[networks, examples]`` answers each test example rightly."""
    task = load_task(zoo.task, data, vectors=zoo.word_vectors())
    found = []
    index = torch.randperm(task.num_samples["test"], generator=torch.Generator().manual_seed(0))
    parts = [task.batch("test", part[None]) for part in index[:examples].split(CHUNK)]
    for row in zoo.select(percent=75):
        network = zoo.network(int(row)).eval()
        right = [
            network(task.module_inputs(part.inputs[0])).argmax(-1) == part.labels[0]
            for part in parts
        ]
        found.append(torch.cat(right).numpy())
    return np.stack(found)


def main() -> None:
    """Print a row for each number of examples."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("zoo")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    right = answers(Zoo.open(args.zoo), args.data, args.examples)
    if args.out:
        np.save(args.out, right)
    source, accuracy = np.random.default_rng(0), right.mean(1)
    print(f"{len(right)} networks, {right.shape[1]:,} test examples")
    print("examples | tau, the same examples | tau, examples of its own | simulated worth of both")
    for count in (k for k in EXAMPLES if 8 <= k <= right.shape[1] // 4):
        shared, apart = [], []
        for _ in range(DRAWS):
            drawn = np.zeros(right.shape[1], bool)
            drawn[source.choice(len(drawn), count, replace=False)] = True
            truth = right[:, ~drawn].mean(1)
            shared.append(kendall_tau(truth, right[:, drawn].mean(1)))
            own = source.random(right.shape).argpartition(count, 1)[:, :count]
            apart.append(kendall_tau(accuracy, np.take_along_axis(right, own, 1).mean(1)))
        taus = [float(np.mean(each)) for each in (shared, apart)]
        worth = worth_in_examples(accuracy, taus)
        print(f"{count:8,} | {taus[0]:.3f} | {taus[1]:.3f} | {worth[0]} and {worth[1]}")


if __name__ == "__main__":
    main()
