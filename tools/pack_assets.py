"""Puts a part of a zoo, or a run folder, into assets/ under a name, and writes assets/index.json.

python tools/pack_assets.py zoo ZOO mnist-sample --runs 400 --description "…"
python tools/pack_assets.py predictor RUN mnist-nfn --description "…"

An asset is made beside its place and moved there whole; one of the same name is replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from transformer_nfn.cli.console import explained
from transformer_nfn.io.assets import (
    CHECKOUT,
    FORMAT,
    INDEX_FILE,
    NAME,
    Asset,
    AssetError,
    AssetFile,
    read_index,
)
from transformer_nfn.io.files import file_sha256, write_text
from transformer_nfn.io.json_fields import json_text
from transformer_nfn.prediction.metrics import LEVEL, conformal_radius, coverage, standard_error
from transformer_nfn.prediction.runs import (
    DISTANCE_FILE,
    ENSEMBLE_TAU,
    LOG_FILE,
    RUN_FILE,
    RunRecord,
    read_log,
    read_predictions,
    write_predictions,
)
from transformer_nfn.zoo import Zoo, load_task
from transformer_nfn.zoo.store import Folder, write_shard
from transformer_nfn.zoo.store.folder import VECTORS_FILE, Checksums
from transformer_nfn.zoo.verify import measure_accuracy

LIMIT = 40 * 2**20

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="What users will type.")]
Description = Annotated[str, typer.Option(help="One line about it.")]
Assets = Annotated[Path, typer.Option(help="The folder of assets.")]


@app.command("zoo")
def pack_zoo(
    source: Annotated[Path, typer.Argument(help="A zoo folder.")],
    name: Name,
    description: Description,
    runs: Annotated[int, typer.Option(min=1, help="So many runs, one checkpoint each.")],
    percent: Annotated[int, typer.Option(help="Which checkpoint of each run.")] = 75,
    seed: Annotated[int, typer.Option(help="Chooses the runs.")] = 0,
    unseen_by: Annotated[
        Path | None,
        typer.Option(help="Only test networks of this run folder, which it never learned from."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The task's files, where accuracies must be measured anew.")
    ] = None,
    assets: Assets = CHECKOUT,
) -> None:
    """Packs checkpoints of some runs, in float16, as a zoo that `tnfn zoo verify` accepts.

    If the source keeps float32, the recorded accuracy becomes that of the rounded weights.
    """
    zoo = Zoo.open(source)
    rows = choose_rows(zoo, runs, percent, seed, unseen_by)
    _pack("zoo", name, description, assets, lambda out: copy_rows(zoo, rows, out, data))


@app.command("predictor")
def pack_predictor(
    source: Annotated[Path, typer.Argument(help="A run folder, as `tnfn train` writes it.")],
    name: Name,
    description: Description,
    best_seed: Annotated[
        bool, typer.Option("--best-seed", help="Only the seed of the highest validation τ.")
    ] = False,
    assets: Assets = CHECKOUT,
) -> None:
    """Packs a run folder with its predictors; what only resuming needs is left out."""
    record = RunRecord.read(source)
    if record.status != "done" or not record.seeds:
        raise AssetError(f"'{source}' holds no predictor: {record.status}")

    def write(out: Path) -> None:
        copy_run(source, record, out)
        if best_seed:
            keep_best_seed(record, out)

    _pack("predictor", name, description, assets, write)


def choose_rows(
    zoo: Zoo, runs: int, percent: int, seed: int, unseen_by: Path | None
) -> np.ndarray:
    """One row each of some runs, in the order of the zoo."""
    rows = zoo.select(percent=percent)
    if unseen_by is not None:
        found = read_predictions(unseen_by)
        test = found["run"][found["split"] == "test"].astype(str)
        rows = rows[np.isin(zoo.table["run"][rows].astype(str), test)]
    if len(rows) < runs:
        raise AssetError(f"'{zoo.path}': {runs} networks asked, {len(rows)} are there to choose")
    return np.sort(np.random.default_rng(seed).permutation(rows)[:runs])


def copy_rows(zoo: Zoo, rows: np.ndarray, out: Path, data: Path | None) -> None:
    """A zoo of these rows alone, stored in float16."""
    if zoo.metadata["dtype"] == "float16":
        _write_zoo(zoo, rows, out, {})
        return
    # Rounding changes a network a little: what is recorded must be what is stored.
    _write_zoo(zoo, rows, out, {})
    rounded = Zoo.open(out)
    task = load_task(zoo.metadata["task"]["name"], data, held=0.0, vectors=zoo.word_vectors())
    runs = rounded.table["run"].tolist()
    measured = {run: measure_accuracy(rounded, task, row) for row, run in enumerate(runs)}
    shutil.rmtree(out)
    _write_zoo(zoo, rows, out, measured)


def _write_zoo(zoo: Zoo, rows: np.ndarray, out: Path, measured: dict[str, float]) -> None:
    table = [zoo.config(int(row)) for row in rows]
    for row in table:
        if row["run"] in measured:
            row |= {"test_accuracy": measured[row["run"]], "test_loss": float("nan")}
    about: dict[str, Any] = {
        **{k: v for k, v in zoo.metadata.items() if k not in _WRITTEN_ANEW},
        "runs": len(rows),
        "dtype": "float16",
        "shards": 1,
        "plan": [[row["run"] for row in table]],
        "packed_from": {"runs": zoo.metadata.get("runs"), "networks": len(zoo)},
    }
    out.mkdir(parents=True)
    if (zoo.path / VECTORS_FILE).exists():
        Checksums(out).replace(VECTORS_FILE, Checksums(zoo.path).read(VECTORS_FILE))
    folder = Folder.create(out, zoo.sizes, about)
    made, layout, weights = {"packed_from": zoo.path.name}, zoo.layout, zoo.batch(rows).weights
    write_shard(folder.shard_path("00000"), layout, weights, table, made, torch.float16)
    folder.merge()
    shutil.rmtree(out / "claims")


_WRITTEN_ANEW = ("format", "kind", "made_by", "architecture", "space")


def copy_run(source: Path, record: RunRecord, out: Path) -> None:
    """What a finished run folder needs to predict, and what it says of itself."""
    out.mkdir(parents=True)
    if DISTANCE_FILE not in record.files:
        raise AssetError(f"'{source}' has no {DISTANCE_FILE}, so it cannot predict")
    for name in (RUN_FILE, *record.files):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def keep_best_seed(record: RunRecord, folder: Path) -> None:
    """Reduces a run folder to the seed of the highest validation τ, and its figures to that seed's.

    A guard stays; its figures on test networks are left out, because they were those of all seeds.
    """
    if any("val_tau" not in row for row in record.seeds):
        raise AssetError(f"seeds of '{record.model}' have no validation τ to choose by")
    best = max(record.seeds, key=lambda row: row["val_tau"])
    for row in record.seeds:
        if row is not best:
            shutil.rmtree(folder / f"seed-{row['seed']}")
    columns = read_predictions(folder)
    columns = {name: values[columns["seed"] == best["seed"]] for name, values in columns.items()}
    write_predictions(folder, columns)
    if (folder / LOG_FILE).is_file():
        lines = [line for line in read_log(folder / LOG_FILE) if line["seed"] == best["seed"]]
        write_text(folder / LOG_FILE, "".join(json_text(line) + "\n" for line in lines))
    residuals = (columns["accuracy"] - columns["predicted"]).astype(float)
    summary = {
        **{key: best[key] for key in ("tau", "r2", "mae")},
        "tau_se": standard_error([best["tau"]]),
        ENSEMBLE_TAU: best["tau"],
        "coverage": coverage(*(residuals[columns["split"] == part] for part in ("val", "test"))),
        "level": LEVEL,
        "radius": conformal_radius(residuals),
        "shift": record.summary["shift"],
    }
    replace(record, seeds=[best], summary=summary).write(folder)


def _pack(
    kind: str, name: str, description: str, assets: Path, write: Callable[[Path], None]
) -> None:
    if not NAME.fullmatch(name):
        raise AssetError(f"a name has letters, digits, '.', '_' and '-' only, found '{name}'")
    index = assets / INDEX_FILE
    known = read_index(index) if index.is_file() else {}
    beside, place = assets / f".{name}.new", assets / name
    shutil.rmtree(beside, ignore_errors=True)
    try:
        write(beside)
        files = {
            path.relative_to(beside).as_posix(): AssetFile(path.stat().st_size, file_sha256(path))
            for path in sorted(beside.rglob("*"))
            if path.is_file()
        }
        known[name] = Asset(name, kind, name, files, description)
        total = sum(asset.size for asset in known.values())
        if total > LIMIT:
            raise AssetError(
                f"assets would take {total / 2**20:.1f} MiB with '{name}', at most "
                f"{LIMIT / 2**20:g} are allowed"
            )
        shutil.rmtree(place, ignore_errors=True)
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    entries = {key: asset.to_json() for key, asset in sorted(known.items())}
    write_text(index, json.dumps({"format": FORMAT, "assets": entries}, indent=1) + "\n")
    size = known[name].size / 2**20
    typer.echo(f"{place}: {size:.1f} MiB; all assets {total / 2**20:.1f} of {LIMIT / 2**20:g} MiB")


if __name__ == "__main__":
    with explained():
        app()
