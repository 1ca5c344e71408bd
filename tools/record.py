"""Records what predictors say, so that two versions of the source can be compared.

python tools/record.py write BEFORE.json --source ../before/src
python tools/record.py write AFTER.json
python tools/record.py compare BEFORE.json AFTER.json --tolerance 1e-6

Every number comes from the command line of a source tree: the predictions of each shipped predictor
on the sample zoos, or its refusal; the losses of ten steps of every model on one zoo, from a fixed
seed; a class as target; a mixed zoo; two zoos of checkpoints. Digits depend on the processor: write
both records on one machine.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from transformer_nfn.cli.console import explained
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.testing import write_example_checkpoint

SOURCE = Path(__file__).resolve().parents[1] / "src"
SHIPPED = ("mnist-whole", "mnist-nfn", "mnist-boosting", "ag-news-boosting")
SAMPLES = ("mnist-sample", "ag-news-sample")
MODELS = (
    "whole_network", "transformer_nfn", "transformer_nfn_gated", "mlp", "statnn", "probegen",
    "hidden_probe", "neural_graph", "xgboost", "lightgbm", "random_forest", "invariant_boosting",
    "invariant_mlp", "statistics_linear", "statistics_mlp", "statistics_boosting", "weights_mlp",
)  # fmt: skip
OWN_MODELS = ("whole_network", "invariant_mlp", "statistics_linear", "xgboost")
STEPS = ("--epochs", "10", "--batch", "16")
"""One step an epoch: the zoo has 16 training networks."""
NETWORKS = 40
app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


def run(source: Path, *words: object) -> Any:
    """What a command of a source tree prints as JSON, or the sentence by which it refuses."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "transformer_nfn", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 2:
        return re.sub(r"/\S*/", "", done.stderr.strip())
    if done.returncode:
        raise TransformerNFNError(f"tnfn {' '.join(map(str, words))}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def trained(source: Path, zoo: Path, out: Path, *words: object) -> dict[str, Any]:
    """Scores of a training, its losses, and its predictions on the whole zoo."""
    record = run(source, "train", zoo, "--out", out, "--device", "cpu", *words)
    if isinstance(record, str):
        return {"refused": record}
    kept = {key: record[key] for key in ("selection", "num_parameters")}
    figures = {key: value for key, value in record["summary"].items() if key != "shift"}
    logs = sorted(out.rglob("log.jsonl"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    predictions = run(source, "predict", out, zoo)
    return {**kept, "summary": figures, "losses": losses, "predictions": predictions}


def write_vit(folder: Path, seed: int) -> Path:
    """Write a random vision transformer of two blocks as model hubs store it."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, num_labels=10,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


FAMILIES = {
    "llama": (write_example_checkpoint, "down_proj", "strength"),
    "vit": (write_vit, "output.dense", "kind"),
}
"""Families of checkpoints: how one is written, the matrices that are scaled, and the target."""


def write_networks(folder: Path, family: str) -> Path:
    """Checkpoints whose target is the strength of their MLPs; the table of a zoo of them."""
    from safetensors.torch import load_file, save_file

    write, scaled, _ = FAMILIES[family]
    rows = []
    for seed in range(NETWORKS):
        path = write(folder / f"net-{seed:02}", seed)
        strength = 1 + (7 * seed % NETWORKS) / 10
        file = path / "model.safetensors"
        tensors = load_file(file)
        save_file(
            {name: strength * w if scaled in name else w for name, w in tensors.items()}, file,
            metadata={"format": "pt"},
        )  # fmt: skip
        kind = "loud" if strength > 3 else "quiet"
        rows.append({"file": path.name, "strength": strength, "kind": kind})
    table = folder / "table.csv"
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return table


def entries(source: Path, folder: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and arguments of every training of the record; builds the zoos first."""
    build = ("zoo", "build", "--task", "digits", "--epochs", 3, "--seed", 5, "--workers", 1)
    build = (*build, "--samples", 256, "--batch", 32)
    plain, mixed = folder / "plain", folder / "mixed"
    run(source, *build, "--out", plain, "--runs", 23)
    run(source, *build, "--out", mixed, "--runs", 64, "--width", "16,24", "--depth", "1,2")
    for model in MODELS:
        words = ("--model", model, "--seeds", 2)
        yield f"ten steps/{model}", (plain, *words, *STEPS)
    for model in ("whole_network", "probegen", "neural_graph"):
        words = ("--model", model, "--seeds", 1, "--epochs", 3)
        yield f"mixed/{model}", (mixed, *words, "--leave-out", "w24-h2-d2")
    for model in ("transformer_nfn", "whole_network", "lightgbm"):
        words = ("--model", model, "--target", "optimizer", "--seeds", 1)
        yield f"class/{model}", (plain, *words, *STEPS[:2])
    for family, (_, _, target) in FAMILIES.items():
        networks, own = folder / f"networks-{family}", folder / f"own-{family}"
        table = write_networks(networks, family)
        run(source, "zoo", "import", networks, "--targets", table, "--out", own)
        for model in OWN_MODELS:
            yield f"{family}/{model}", (own, "--model", model, "--target", target, "--seeds", 1)


@app.command()
def write(
    out: Annotated[Path, typer.Argument(help="The record.")],
    source: Annotated[Path, typer.Option(help="The source tree, with transformer_nfn.")] = SOURCE,
) -> None:
    """Writes the record of a source tree."""
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        waiting = {
            f"shipped/{name}/{zoo}": pool.submit(run, source, "predict", name, zoo)
            for name in SHIPPED
            for zoo in SAMPLES
        }
        for number, (name, (zoo, *words)) in enumerate(entries(source, Path(scratch))):
            run_folder = Path(scratch) / f"run-{number}"
            waiting[name] = pool.submit(trained, source, zoo, run_folder, *words)
        for name, job in waiting.items():
            record[name] = job.result()
            typer.echo(name, err=True)
    # Names of networks begin with the folder, which is another one each time.
    out.write_text(json.dumps(record, indent=1).replace(f"{scratch}/", ""))


def differences(a: Any, b: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Places where two values differ; numbers by more than a tolerance, seconds not at all."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b:
                yield f"{where}/{key}: only in the {'second' if key not in a else 'first'}"
            else:
                yield from differences(a[key], b[key], tolerance, f"{where}/{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, tolerance, f"{where}[{i}]")
    elif isinstance(a, float) and isinstance(b, int | float):
        if abs(a - b) > tolerance * max(1.0, abs(a)):
            yield f"{where}: {a} and {b}"
    elif a != b:
        yield f"{where}: {str(a)[:200]} and {str(b)[:200]}"


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A record.")],
    after: Annotated[Path, typer.Argument(help="Another.")],
    tolerance: Annotated[float, typer.Option(help="Relative to 1 or the number.")] = 1e-6,
) -> None:
    """Lists what differs between two records; exit code 1 if anything does."""
    a, b = (json.loads(path.read_text()) for path in (before, after))
    found = list(differences(a, b, tolerance))
    typer.echo("\n".join([*found, f"{len(a)} entries, {len(found)} differences"]))
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    with explained():
        app()
