"""Valid inputs of every kind that a command takes, small, for damaged copies to be made of."""

import csv
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from made_networks import ABOUT, made
from safetensors.torch import save_file

from hub_server import into_shards
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.networks import save_network
from transformer_nfn.prediction.data import Parts, Selection, describe_zoo, load_parts
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import Execution
from transformer_nfn.spaces import attention_block
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import NetworkSizes, Zoo
from transformer_nfn.zoo.module import SmallTransformer, to_state_dict
from transformer_nfn.zoo.store import Folder, write_shard
from transformer_nfn.zoo.store.folder import write_groups

RUNS = {
    "whole_network": {"probes": 2, "rank": 2, "hidden": 8},
    "transformer_nfn": {"channels": [2]},
    "mlp": {},
    "statnn": {},
    "xgboost": {"rounds": 5, "threads": 1},
    "lightgbm": {"rounds": 5, "threads": 1},
    "random_forest": {"rounds": 4, "threads": 1},
    "invariant_boosting": {"rounds": 5, "threads": 1},
    "invariant_mlp": {"epochs": 3},
}  # fmt: skip
"""Predictors whose run folders are damaged, and the options that keep them small."""
QUANTISED = {"int8": "int8 groups", "float8": "float8 blocks", "gptq": "gptq", "packed": "packed"}
IN_A_SHARD = 12
FLEET = 18


ARCH = NetworkSizes(tokens=16, classes=3, patch=4, d_model=8, heads=2, d_ff=16, blocks=2)
"""Of networks on digits, as a zoo that was imported may hold them."""
RECIPE = {"batch": 32, "select": "held"}
IMPORTED: Mapping[str, Any] = {"origin": "import", "recipe": RECIPE}
BUILT: Mapping[str, Any] = {
    "origin": "build", "seed": 0, "runs": 2 * IN_A_SHARD,
    "plan": [[f"{i:05d}" for i in range(n, n + IN_A_SHARD)] for n in (0, IN_A_SHARD)],
    "recipe": {**RECIPE, "epochs": 4, "precision": "float32", "percents": [50, 75, 100]},
}  # fmt: skip


def build(folder: Path) -> None:
    """Writes one of everything below ``folder``."""
    _zoo(folder / "zoo")
    _zoo(folder / "built", replace(ARCH, classes=10), BUILT)
    about = ABOUT | {"architecture": ARCH.to_json()}
    parts = Parts(made(40, 0, ARCH), made(16, 1, ARCH), made(16, 2, ARCH))
    for model, options in RUNS.items():
        experiment = Experiment(model, [0], Protocol(epochs=2), options, Selection().to_json())
        train_run(about, parts, experiment, folder / "runs" / model)
    _interrupted(folder)
    _mixed(folder / "mixed")
    _networks(folder)
    _checkpoints(folder)
    _own_networks(folder)
    _authors(folder / "authors")
    shutil.make_archive(str(folder / "authors"), "zip", folder / "authors")
    (folder / "own.toml").write_text('extends = "gpt2"\n[config]\nn_head = 4\n')


def _zoo(path: Path, sizes: NetworkSizes = ARCH, plan: Mapping[str, Any] = IMPORTED) -> None:
    data = made(2 * IN_A_SHARD, 5, sizes)
    weights = sizes.row_layout.pack(data.network.views)
    (path / "shards").mkdir(parents=True)
    about = {
        "task": {"name": "digits", "samples": None, "provenance": {}},
        "seeds": "each", "dtype": "float32", "shards": 2, **plan,
    }  # fmt: skip
    folder = Folder.create(path, sizes, about)
    for i, shard in enumerate(folder.shards):
        chosen = range(i * IN_A_SHARD, (i + 1) * IN_A_SHARD)
        rows = [
            {
                "run": f"{r:05d}" if "plan" in plan else f"run{r}",
                "optimizer": "adam", "learning_rate": 0.001, "l2": 0.0,
                "init_std": 0.1, "dropout": 0.0, "train_fraction": 1.0, "seed": r, "epoch": 3,
                "percent": 75, "best": False, "crashed": False,
                "test_accuracy": float(data.accuracy[r]),
            }
            for r in chosen
        ]  # fmt: skip
        path = folder.shard_path(shard)
        write_shard(path, sizes.row_layout, weights[list(chosen)], rows, {})
    folder.merge()


def _mixed(path: Path) -> None:
    """A mixed zoo of one kind."""
    group = ARCH.group
    path.mkdir()
    write_groups(path, [group], {"task": "digits", "seeds": "each"})
    _zoo(path / group.name)


def _interrupted(folder: Path) -> None:
    """A training of three epochs that was ended after the second."""
    zoo = Zoo.open(folder / "zoo")

    def stop(line: dict[str, object]) -> None:
        if line.get("epoch") == 2:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train_run(
            describe_zoo(zoo),
            load_parts(zoo),
            Experiment("statnn", [0], Protocol(epochs=3), selection=Selection().to_json()),
            folder / "half",
            execution=Execution(report=stop, save_every=0),
        )
    assert (folder / "half" / "training.safetensors").is_file()
    assert (folder / "half" / "log.jsonl").is_file()


def _networks(folder: Path) -> None:
    block = attention_block(8, 2, 4, 4, 12)
    save_network(folder / "net.safetensors", block, block.randn(1))
    one = {name: w[0].contiguous() for name, w in made(1, 7, ARCH).network.views.items()}
    save_file(one, folder / "ours.safetensors")
    _output("disguise", folder / "ours.safetensors", "--out", folder / "other.safetensors")
    torch.save(to_state_dict(ARCH, one), folder / "theirs.pt")


def _cached(source: Path, home: Path) -> None:
    """A model in the cache of the hub's client, in two shards."""
    commit = "0" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text(commit)
    into_shards(Path(shutil.copytree(source, home / "snapshots" / commit)))


def _checkpoints(folder: Path) -> None:
    from tiny_checkpoints import save as save_family

    import tiny_families
    from gguf_conversion import write_gguf
    from lora_folders import write_adapter
    from onnx_files import write_onnx
    from quantised_folders import write_quantised

    save_family("gpt2", folder / "hub")
    (folder / "hub/1_Pooling").mkdir()
    (folder / "hub/1_Pooling/config.json").write_text("{}")
    _cached(folder / "hub", folder / "home/hub/models--org--model")
    _encoder(folder / "encoder.pt")
    save_family("bert", folder / "bert")
    save_family("mixtral", folder / "mixture")
    _output("disguise", folder / "hub", "--out", folder / "disguised")
    write_gguf(folder / "hub", folder / "model.gguf", "Q8_0")
    write_adapter(folder / "hub", folder / "adapter", ("c_attn",), fan_in_fan_out=True)
    llama = tiny_families.save(tiny_families.build("llama", dtype=torch.float32), folder / "llama")
    write_gguf(llama, folder / "llama.gguf", "Q4_0")
    for name, form in QUANTISED.items():
        write_quantised(llama, folder / name, form)
    write_onnx(folder / "bert", folder / "exported", external="model.onnx_data")
    for name in ("hub", "disguised"):
        shutil.copytree(folder / name, folder / "models" / name)
    _output("fingerprint", folder / "hub", folder / "bert", "--out", folder / "prints.parquet")
    _output("compare", "--matrix", folder / "models", "--out", folder / "pairs.json")


def _own_networks(folder: Path) -> None:
    """Networks of two families with a table of targets, and a zoo of them."""
    for name in ("hub", "disguised", "bert"):
        shutil.copytree(folder / name, folder / "own" / name)
    rows = ("hub,2.5,adam", "disguised,3.25,sgd", "bert,-1,adam")
    (folder / "own.csv").write_text("\n".join(("file,loss,optimizer", *rows)) + "\n")
    cells = [row.split(",") for row in rows]
    typed = [{"file": file, "loss": float(loss), "optimizer": name} for file, loss, name in cells]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in typed))
    pq.write_table(pa.Table.from_pylist(typed), folder / "own.parquet")
    words = ("--targets", folder / "own.csv", "--out", folder / "ownzoo")
    _output("zoo", "import", folder / "own", *words)
    fleet = Zoo.create(folder / "fleet")
    with TemporaryDirectory() as scratch:
        for i in range(FLEET):
            network = write_example_checkpoint(Path(scratch) / f"run-{i}", i)
            fleet.add(network, loss=float(7 * i % FLEET), optimizer=("adam", "sgd")[i % 2])
    words = ("--model", "invariant_mlp", "--target", "loss", "--seeds", 1, "--epochs", 2)
    _output("train", fleet.path, *words, "--out", folder / "runs" / "own")


def _encoder(path: Path) -> None:
    """An encoder of torch, whose file states neither heads nor activation nor norms."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.in_proj": [48, 16], "self_attn.out_proj": [16, 16], "linear1": [24, 16],
        "linear2": [16, 24], "norm1": [16], "norm2": [16],
    }  # fmt: skip
    state = {}
    for layer in range(2):
        for name, shape in shapes.items():
            dot = "_" if name.endswith("in_proj") else "."
            for kind, size in (("weight", shape), ("bias", shape[:1])):
                numbers = torch.randn(size, generator=generator)
                state[f"layers.{layer}.{name}{dot}{kind}"] = numbers
    torch.save(state, path)


def _authors(folder: Path) -> None:
    (folder / "mnist").mkdir(parents=True)
    (folder / "metadata").mkdir()
    sizes = NetworkSizes.of(KNOWN_TASKS["mnist"])
    rows = []
    for i in range(3):
        torch.manual_seed(i)
        file = f"run{i}_75_{5000 + 100 * i}.pt"
        torch.save(SmallTransformer(sizes).state_dict(), folder / "mnist" / file)
        rows.append(
            {
                "seed": i, "optimizer": "Adam", "lr": 0.001, "weight_decay": 1e-6, "init_std": 0.2,
                "dropout": 0.05, "train_fraction": 0.9, "ckpt_epoch": 75, "ckpt_file": file,
                "test_top1_accuracy": 0.5 + 0.01 * i,
            }
        )  # fmt: skip
    with (folder / "metadata" / "mnist.csv").open("w", newline="") as sheet:
        writer = csv.DictWriter(sheet, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _output(*words: object) -> str:
    from tnfn_command import tnfn

    with patch("sys.argv", sys.argv):
        done = tnfn(*words)
    assert done.returncode == 0, done
    return done.stdout
