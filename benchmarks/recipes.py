"""Benchmark of warnings and intervals on healthy networks of training recipes a zoo does not have.

Networks of scikit-learn's digits or of MNIST as in the zoos that are built here, and small ViTs of
`transformers` of the digits. Their recipes differ from the zoos' in optimiser, schedule,
initialisation, loss, augmentation, batch and length:

    python benchmarks/recipes.py networks vit OUT [--recipes test] [--each 20] [--data DIR]
    python benchmarks/recipes.py damaged ZOO OUT        # copies of such ViTs, with their accuracy
    python benchmarks/recipes.py judge RUN OUT…

The rules were chosen on the recipes of ``tune``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from transformer_nfn.prediction.guard.own import damaged_copies
from transformer_nfn.prediction.predict import Prediction, predict
from transformer_nfn.zoo import ModelZoo, NetworkSizes
from transformer_nfn.zoo.module import SmallTransformer
from transformer_nfn.zoo.training.tasks import load_task

Init = Callable[[nn.Module], None]
BUILT = {
    "digits": NetworkSizes(tokens=16, classes=10, patch=4),
    "mnist": NetworkSizes(tokens=49, classes=10, patch=16),
}
"""Sizes of networks as in the zoos."""
MOST_IMAGES = 20000


class Data(NamedTuple):
    """Images and labels to train on, and others that measure accuracy."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Recipe:
    """A way of training.

    Attributes:
        optimizer: class in `torch.optim`.
        rate: smallest and largest learning rate.
        steps: smallest and largest number of steps.
        schedule: ``constant``, ``cosine``, ``step`` or ``one cycle``; all but the first warm up.
        init: changes the initial weights.
        average: decay of the mean of the weights over steps, which is kept then; 0 for none.
    """

    name: str
    optimizer: str
    rate: tuple[float, float]
    steps: tuple[int, int] = (60, 500)
    batch: int = 64
    schedule: str = "constant"
    smoothing: float = 0.0
    noise: float = 0.0
    mixed: bool = False
    dropout: float = 0.0
    clip: float = 0.0
    average: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    init: Init | None = None


def _each_matrix(change: Callable[[Tensor], Any]) -> Init:
    def init(module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                change(parameter.data if parameter.ndim == 2 else parameter.data.flatten(1))

    return init


RECIPES = {
    "tune": [
        Recipe("AdamW, warm-up, cosine, label smoothing", "AdamW", (5e-4, 4e-3), schedule="cosine",
               smoothing=0.1, options=(("weight_decay", 0.05),)),
        Recipe("SGD with Nesterov momentum", "SGD", (0.01, 0.08), (100, 600), batch=32,
               options=(("momentum", 0.9), ("nesterov", True)),
               init=_each_matrix(nn.init.xavier_uniform_)),
        Recipe("Adam, noise, dropout 0.3", "Adam", (5e-4, 3e-3), noise=0.2, dropout=0.3),
        Recipe("RMSprop, steps, Kaiming", "RMSprop", (3e-4, 1e-3), batch=128, schedule="step",
               init=_each_matrix(nn.init.kaiming_normal_)),
    ],
    "test": [
        Recipe("AdamW, one cycle, weight decay 0.5", "AdamW", (1e-3, 6e-3), schedule="one cycle",
               options=(("weight_decay", 0.5),),
               init=_each_matrix(nn.init.xavier_normal_)),
        Recipe("Adagrad, batch 24", "Adagrad", (0.01, 0.05), (100, 700), batch=24),
        Recipe("NAdam, clipped, averaged weights", "NAdam", (5e-4, 3e-3), clip=1.0, average=0.98),
        Recipe("SGD, cosine, orthogonal", "SGD", (0.1, 0.4), (150, 700), batch=256,
               schedule="cosine", clip=1.0, init=_each_matrix(nn.init.orthogonal_)),
        Recipe("Adam, mixup, long", "Adam", (1e-3, 4e-3), (400, 1200), mixed=True,
               schedule="cosine"),
    ],
}  # fmt: skip


def train(module: nn.Module, recipe: Recipe, data: Data, seed: int) -> nn.Module:
    """Train a module of images by a recipe; rate and steps are drawn from its ranges."""
    torch.manual_seed(seed)
    first, last = (math.log(x) for x in recipe.rate)
    rate = math.exp(first + (last - first) * float(torch.rand(())))
    steps = int(torch.randint(recipe.steps[0], recipe.steps[1] + 1, ()))
    if recipe.init is not None:
        recipe.init(module)
    optimizer = getattr(torch.optim, recipe.optimizer)(
        module.parameters(), rate, **dict(recipe.options)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(recipe.schedule, steps))
    mean = {name: w.detach().clone() for name, w in module.named_parameters()}
    module.train()
    for _ in range(steps):
        rows = torch.randint(0, len(data.labels), (recipe.batch,))
        x, y = data.images[rows], one_hot(data.labels[rows], 10).float()
        if recipe.mixed:
            share, other = float(torch.rand(()) ** 2) / 2, torch.randperm(len(x))
            x, y = (1 - share) * x + share * x[other], (1 - share) * y + share * y[other]
        loss = cross_entropy(
            logits(module, x + recipe.noise * torch.randn_like(x)), y,
            label_smoothing=recipe.smoothing,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        if recipe.clip:
            nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        for name, w in module.named_parameters():
            mean[name].lerp_(w.detach(), 1 - recipe.average)
    module.load_state_dict(mean, strict=False)
    return module.eval()


def _schedule(name: str, steps: int) -> Callable[[int], float]:
    warm = max(1, steps // 10)
    late: dict[str, Callable[[float], float]] = {
        "constant": lambda t: 1.0,
        "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
        "step": lambda t: 0.3 ** int(3 * t),
        "one cycle": lambda t: 1 - abs(2 * t - 0.6) / 1.4,
    }
    warms = name != "constant"
    return lambda step: min(1.0, (step + 1) / warm if warms else 1.0) * late[name](step / steps)


def logits(module: nn.Module, images: Tensor) -> Tensor:
    """Outputs of a plain module, or of one of `transformers`."""
    outputs = module(images)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


@torch.no_grad()
def accuracy(module: nn.Module, data: Data) -> float:
    """Share of images that were not trained on and are classified correctly."""
    right = logits(module, data.test_images).argmax(-1) == data.test_labels
    return float(right.double().mean())


def load_data(kind: str, folder: Path | None = None) -> Data:
    """Images as the built zoos, or the ViTs, read them; at most `MOST_IMAGES` of each split."""
    if kind == "vit":
        from sklearn.datasets import load_digits

        found = load_digits()
        images = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
        labels = torch.tensor(found.target)
        return Data(images[:1200], labels[:1200], images[1200:], labels[1200:])
    task = load_task(kind, folder, held=0.0)
    split = {}
    for name in ("train", "test"):
        count = min(task.num_samples[name], MOST_IMAGES)
        batch = task.batch(name, torch.arange(count)[None])
        split[name] = (task.module_inputs(batch.inputs[0]), batch.labels[0])
    return Data(*split["train"], *split["test"])


def new_module(kind: str, dropout: float) -> nn.Module:
    """An untrained network."""
    if kind != "vit":
        return SmallTransformer(BUILT[kind], dropout)
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, num_labels=10, hidden_dropout_prob=dropout,
    )  # fmt: skip
    return ViTForImageClassification(config)


TABLE = "networks.json"


def make_networks(
    kind: str, out: Path, recipes: str, each: int, folder: Path | None = None
) -> None:
    """Train networks of every recipe: a zoo of ViTs, or a folder of files with a table."""
    data, rows = load_data(kind, folder), []
    out.mkdir(parents=True, exist_ok=True)
    zoo = ModelZoo.create(out / "zoo") if kind == "vit" else None
    for r, recipe in enumerate(RECIPES[recipes]):
        if kind == "mnist":  # learns more slowly
            recipe = replace(recipe, steps=(2 * recipe.steps[0], 900))
        for i in range(each):
            seed = {"tune": 1000, "test": 5000}[recipes] + 100 * r + i
            torch.manual_seed(seed)
            module = train(new_module(kind, recipe.dropout), recipe, data, seed)
            measured = accuracy(module, data)
            if zoo is not None:
                zoo.add(module, test_accuracy=measured, recipe=recipe.name)
            else:
                save_file(module.state_dict(), out / f"{seed}.safetensors")
                rows.append(
                    {"file": f"{seed}.safetensors", "group": recipe.name, "accuracy": measured}
                )
    if zoo is None:
        (out / TABLE).write_text(json.dumps(rows))


def make_damaged(source: Path, out: Path, every: int) -> None:
    """Damaged copies of every ``every``-th ViT of a zoo, each tested."""
    from transformers import ViTForImageClassification

    zoo, copies, data = ModelZoo.open(source), ModelZoo.create(out), load_data("vit")
    measured = []
    for row in range(0, len(zoo), every):
        with zoo[row] as model:
            for kind, copy in damaged_copies(model, f"test {row}").items():
                at = copies.add(copy, recipe=kind, original=row)
                module = ViTForImageClassification.from_pretrained(copies.folder(at)).eval()
                measured.append(accuracy(module, data))
    (out / TABLE).write_text(json.dumps(measured))


def judge(run: Path, place: Path) -> None:
    """Print warned and covered shares of the networks of a folder, by recipe or damage."""
    if (place / "zoo.json").exists():
        zoo, table = ModelZoo.open(place), place / TABLE
        known = json.loads(table.read_text()) if table.exists() else zoo.targets["test_accuracy"]
        found, truth = predict(run, zoo), np.array(known)
        groups = np.array([str(g) for g in zoo.targets["recipe"]])
    else:
        rows = json.loads((place / TABLE).read_text())
        found = predict(run, [place / row["file"] for row in rows])
        truth = np.array([row["accuracy"] for row in rows])
        groups = np.array([row["group"] for row in rows])
    for group in (*dict.fromkeys(groups.tolist()), "all"):
        here = np.flatnonzero((groups == group) | (group == "all"))
        print(f"{group:42} {_figures([found[i] for i in here], truth[here])}", flush=True)


def _figures(found: list[Prediction], truth: np.ndarray) -> str:
    warned = np.array([p.warning is not None for p in found])
    inside = np.array([p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    whole = np.array([p.low <= 0 and p.high >= 1 for p in found])
    low, high = binomtest(int(warned.sum()), len(warned)).proportion_ci(method="exact")
    covered = [
        f"{int(inside[rows].sum())} of {int(rows.sum())}" for rows in (warned, ~warned, ~whole)
    ]
    return (
        f"{len(found):4} networks, warned {int(warned.sum())} ({low:.1%} to {high:.1%}), covered: "
        f"warned {covered[0]}, others {covered[1]}; whole range {int(whole.sum())}, the rest "
        f"covered {covered[2]}; median width {np.median([p.high - p.low for p in found]):.2f}"
    )


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(dest="what", required=True)
    made = steps.add_parser("networks")
    made.add_argument("kind", choices=(*BUILT, "vit"))
    made.add_argument("out", type=Path)
    made.add_argument("--recipes", choices=tuple(RECIPES), default="test")
    made.add_argument("--each", type=int, default=20)
    made.add_argument("--data", type=Path, help="folder of MNIST's files")
    broken = steps.add_parser("damaged")
    broken.add_argument("zoo", type=Path)
    broken.add_argument("out", type=Path)
    broken.add_argument("--every", type=int, default=2)
    judged = steps.add_parser("judge")
    judged.add_argument("run", type=Path)
    judged.add_argument("places", type=Path, nargs="+")
    given = parser.parse_args()
    if given.what == "networks":
        make_networks(given.kind, given.out, given.recipes, given.each, given.data)
    elif given.what == "damaged":
        make_damaged(given.zoo, given.out, given.every)
    else:
        for place in given.places:
            print(place)
            judge(given.run, place)


if __name__ == "__main__":
    main()
