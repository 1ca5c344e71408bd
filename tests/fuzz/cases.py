"""Which commands are run on which damaged inputs."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import drawn_damage
import file_damage as d
import import_damage
import onnx_damage
import own_damage
import store_damage
import tensor_damage
from arguments import ARGUMENTS
from expected import Case, Damage, Right, Words

REFUSED, EQUAL, ANSWERED = Right.REFUSED, Right.EQUAL, Right.ANSWERED
UNCHANGED = Right.EQUAL_OR_REFUSED
DRAWN = 0.6
"""Share of the inputs whose damage is drawn from what they are."""


@dataclass(frozen=True)
class Target:
    """A file to damage.

    Attributes:
        path: below the case's folder.
        damagers: one of them is used.
        sign: makes the checksums right again afterwards.
    """

    path: str
    damagers: tuple[d.Damager, ...]
    sign: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Scenario:
    """Commands that read the same inputs, one of which is damaged.

    Attributes:
        inputs: copied from the valid ones.
        commands: one of them is run.
        targets: one of them is damaged; without any, the words themselves are what is wrong.
        answers: see `Case`.
        bad: see `Case`.
        varies: see `Case`.
    """

    name: str
    inputs: tuple[str, ...]
    commands: tuple[Words, ...]
    targets: tuple[Target, ...] = ()
    answers: tuple[int, ...] = (0,)
    bad: tuple[int, ...] = (2,)
    varies: bool = False

    def copy(self, valid: Path, folder: Path) -> None:
        """The undamaged inputs in a folder of their own."""
        folder.mkdir(parents=True)
        for name in self.inputs:
            target = folder / Path(name).name
            copy = shutil.copytree if (valid / name).is_dir() else shutil.copy
            copy(valid / name, target)


def make(scenario: Scenario, seed: int, number: int, valid: Path, folder: Path) -> Case:
    """The damaged input of a number, in a folder of its own; the same for the same seed."""
    chance = Random(f"{seed} {number}")
    scenario.copy(valid, folder)
    streams = drawn_damage.streams(chance)
    if not scenario.targets:
        words, right = chance.choice(ARGUMENTS)
        return Case(words, Damage("the words themselves", right), streams=streams)
    whole = words = chance.choice(scenario.commands)
    if chance.random() < DRAWN:
        if chance.random() < 0.3:
            whole = words = tuple(word for word in words if word != "--json")
        words, done = drawn_damage.draw(chance, folder, words)
    else:
        target = chance.choice(scenario.targets)
        damage = chance.choice(target.damagers)
        place = folder / target.path
        done = damage(chance, place)
        if target.sign is not None and place.is_file() and not place.is_symlink():
            target.sign(place)
            done = Damage(f"signed, {done.what}", done.right)
    return Case(words, done, scenario.answers, scenario.bad, scenario.varies, whole, streams)


PREDICT: Words = ("predict", "RUN", "ours.safetensors", "--json")
RUN_FIELDS = (
    "model", "zoo", "zoo/architecture", "zoo/architecture/*", "seeds", "seeds/0", "seeds/0/seed",
    "summary", "summary/radius", "status", "format", "selection", "selection/train", "protocol",
    "protocol/epochs", "files", "files/*",
)  # fmt: skip
NEEDED_RUN_FIELDS = ("*", "zoo/*", "zoo/architecture/*", "seeds/0/*", "summary/*", "selection/*",
                     "protocol/*", "files/*")  # fmt: skip
STATED = ("--set", "nhead=4", "--set", "norm_first=true", "--set", "activation=gelu")
CACHED = f"home/hub/models--org--model/snapshots/{'0' * 40}"
ABOUT_FIELDS = ("format", "predictor", "settings", "width", "sha256", "sha256/*")
CONFIG_FIELDS = ("blocks", "channels", "channels/*", "classifier", "embedding", "features", "space")
ZOO_FIELDS = ("format", "kind", "architecture", "architecture/*", "shards", "task")
NEURAL = ("whole_network", "transformer_nfn", "mlp", "statnn")
EVALUATED = ("transformer_nfn", "lightgbm")
LIBRARY_FILES = {
    **{
        model: ("trees.safetensors", (tensor_damage.stored_tensor, d.flipped(ANSWERED)))
        for model in ("xgboost", "lightgbm", "invariant_boosting", "random_forest")
    },
    "invariant_mlp": ("model.safetensors", (tensor_damage.stored_tensor, d.flipped(ANSWERED))),
}


def _json(refused: tuple[str, ...], needed: tuple[str, ...], right: Right) -> tuple[d.Damager, ...]:
    wrong = d.field_of_wrong_type(refused, right)
    missing = d.field_missing(needed, Right.ANSWERED)
    return (wrong, wrong, wrong, missing, d.unreadable, d.json_text(ANSWERED), d.reformatted)


def _named_run(model: str, words: Words) -> Words:
    return tuple(model if word == "RUN" else word for word in words)


def _run_folders() -> list[Scenario]:
    scenarios = []
    for model in (*NEURAL, *LIBRARY_FILES):
        targets = [
            Target(f"{model}/run.json", _json(RUN_FIELDS, NEEDED_RUN_FIELDS, UNCHANGED)),
            Target(
                f"{model}/training_distance.safetensors",
                (d.unreadable, tensor_damage.stored_tensor, d.safetensors_header(ANSWERED)),
                store_damage.sign_run,
            ),
            Target(f"{model}/training_distance.safetensors", (d.flipped(REFUSED),)),
        ]
        if model in NEURAL:
            at = f"{model}/seed-0"
            targets += [
                Target(
                    f"{at}/config.json", _json(CONFIG_FIELDS, ("space",), UNCHANGED),
                    store_damage.sign_run,
                ),
                Target(
                    f"{at}/model.safetensors",
                    (
                        d.unreadable,
                        tensor_damage.stored_tensor,
                        tensor_damage.header_claims,
                        d.safetensors_header(ANSWERED),
                        d.swapped("ours.safetensors"),
                    ),
                    store_damage.sign_run,
                ),
                Target(f"{at}/model.safetensors", (d.flipped(REFUSED),)),
            ]
        else:
            name, damagers = LIBRARY_FILES[model]
            at = f"{model}/seed-0"
            targets += [
                Target(
                    f"{at}/predictor.json", _json(ABOUT_FIELDS, ABOUT_FIELDS[:5], UNCHANGED),
                    store_damage.sign_run,
                ),
                Target(f"{at}/{name}", (d.unreadable, d.flipped(REFUSED))),
                Target(f"{at}/{name}", (d.unreadable, *damagers), store_damage.sign_predictor),
            ]
        inputs = (f"runs/{model}", "ours.safetensors", "zoo")
        words = _named_run(model, PREDICT)
        scenarios.append(Scenario(f"predict {model}", inputs, (words,), tuple(targets)))
        if model in EVALUATED:
            words = ("evaluate", model, "zoo", "--json")
            marks = Target(
                f"{model}/trained_on.safetensors",
                (d.something_else, tensor_damage.numbers_of_wrong_kind,
                 d.safetensors_header(ANSWERED)),
                store_damage.sign_run,
            )  # fmt: skip
            scenarios.append(
                Scenario(f"evaluate {model}", inputs, (words,), (targets[0], *targets[2:], marks))
            )
    return scenarios


def _reports() -> list[Scenario]:
    run = "transformer_nfn"
    # A report reads no predictor, so it knows no names of them.
    types = tuple(field for field in RUN_FIELDS if field != "model")
    targets = (
        Target(
            f"{run}/run.json",
            (
                d.field_of_wrong_type(types, ANSWERED),
                d.unreadable,
                d.json_text(ANSWERED),
                d.reformatted,
            ),
        ),
        Target(
            f"{run}/log.jsonl", (d.flipped(ANSWERED), d.swapped("zoo/zoo.json", ANSWERED)),
            store_damage.sign_run,
        ),
        Target(
            f"{run}/predictions.parquet", (store_damage.predictions, d.flipped(ANSWERED)),
            store_damage.sign_run,
        ),
        Target(f"{run}/predictions.parquet", (d.flipped(REFUSED),)),
    )
    inputs = (f"runs/{run}", "zoo")
    return [
        Scenario("report", inputs, (("report", run, "--out", "page.html"),), targets),
        Scenario("record shown", inputs, (("evaluate", run),), targets[:1]),
    ]


def _zoos() -> list[Scenario]:
    inputs = ("zoo", "runs/statnn")
    small = (
        Target("zoo/zoo.json", (d.unreadable, d.flipped(REFUSED), d.field_of_wrong_type(
            ZOO_FIELDS, REFUSED))),
        Target("zoo/zoo.json", (d.field_of_wrong_type(ZOO_FIELDS, UNCHANGED), d.field_missing(
            ZOO_FIELDS, ANSWERED), d.reformatted), store_damage.sign_zoo),
        Target("zoo/checksums.json", (d.unreadable, d.field_of_wrong_type(("*", "*/0"), REFUSED))),
    )  # fmt: skip
    index = (
        Target("zoo/index.parquet", (d.flipped(REFUSED),)),
        Target(
            "zoo/index.parquet",
            (store_damage.parquet_index, store_damage.parquet_index, d.flipped(ANSWERED)),
            store_damage.sign_zoo,
        ),
    )
    shards = (
        Target(
            "zoo/shards/00000.safetensors",
            (d.unreadable, d.flipped(REFUSED), d.flipped(REFUSED, within=3000)),
        ),
    )
    one = ("predict", "statnn", "zoo#1", "--json")
    many = ("evaluate", "statnn", "zoo", "--json")
    verify = ("zoo", "verify", "zoo", "--sample", "0", "--json")
    export = ("zoo", "export", "zoo", "--out", "exported")
    return [
        Scenario("zoo files", inputs, (one, many, ("inspect", "zoo#1", "--json")), small),
        Scenario("zoo verified", inputs, (verify,), (*small[:1], *shards), bad=(1, 2)),
        Scenario("zoo index", inputs, (many, export), index),
        Scenario("zoo shards", inputs, (many, export), shards),
        Scenario(
            "zoo shown", inputs, (("zoo", "info", "zoo"), ("zoo", "plot", "zoo", "--out", "z.png")),
            (
                Target("zoo/zoo.json", (d.unreadable, d.field_of_wrong_type(ZOO_FIELDS, ANSWERED)),
                       store_damage.sign_zoo),
                Target("zoo/index.parquet", (d.flipped(ANSWERED),), store_damage.sign_zoo),
            ),
        ),
        Scenario(
            "zoo trained on", ("zoo",),
            (("train", "zoo", "--model", "statnn", "--epochs", "1", "--seeds", "1", "--out", "r"),),
            (*small, *index, *shards), varies=True,
        ),
        Scenario(
            "zoo of a plan", ("built",),
            (("zoo", "verify", "built", "--sample", "0", "--json"), ("zoo", "info", "built"),
             ("zoo", "export", "built", "--out", "exported"), ("inspect", "built#1", "--json")),
            (Target("built/zoo.json", (d.field_of_wrong_type(("plan", "plan/*", "runs", "seed"),
                                                             UNCHANGED),), store_damage.sign_zoo),
             Target("built/shards/00001.safetensors", (d.answered(d.unreadable),))),
            bad=(1, 2),
        ),
        Scenario(
            "mixed zoo", ("mixed",), (("zoo", "info", "mixed", "--json"),),
            (
                Target("mixed/kinds.json", (
                    d.something_else, d.flipped(REFUSED), d.field_of_wrong_type(("*",), REFUSED))),
                Target("mixed/kinds.json", (
                    d.field_of_wrong_type(("format", "kind", "kinds", "kinds/*"), ANSWERED),
                    d.reformatted), store_damage.sign_kinds),
            ),
            varies=True,  # it tells the size of the files
        ),
        Scenario(
            "training resumed", ("zoo", "half"),
            (("train", "zoo", "--model", "statnn", "--epochs", "3", "--seeds", "1", "--out",
              "half"),),
            (
                Target("half/training.safetensors", (
                    d.other_bytes, tensor_damage.numbers_of_wrong_kind,
                    d.safetensors_header(ANSWERED))),
                Target("half/log.jsonl", (d.flipped(ANSWERED), d.swapped("zoo/zoo.json"))),
            ),
            varies=True,
        ),
    ]  # fmt: skip


def _networks() -> list[Scenario]:
    compare = ("compare", "ours.safetensors", "other.safetensors", "--json")
    stored = (
        d.unreadable, tensor_damage.stored_tensor, tensor_damage.stored_tensor,
        tensor_damage.header_claims, d.safetensors_header(ANSWERED),
    )  # fmt: skip
    pickled = (
        d.unreadable, tensor_damage.pickled_tensor, tensor_damage.pickled_tensor,
        tensor_damage.pickled_whole, d.flipped(ANSWERED), d.flipped(ANSWERED, within=600),
    )  # fmt: skip
    inputs = ("ours.safetensors", "other.safetensors")
    unwrapped = (tensor_damage.wrapped, tensor_damage.quantised_name)
    theirs = ("theirs.pt", "runs/transformer_nfn", "ours.safetensors")
    target = (Target("ours.safetensors", stored),)
    return [
        Scenario("compare", inputs, (compare,), target, answers=(0, 1, 3)),
        Scenario(
            "one network", inputs,
            (
                ("inspect", "ours.safetensors", "--json"),
                ("fingerprint", "ours.safetensors", "other.safetensors", "--json"),
                ("disguise", "ours.safetensors", "--out", "out.safetensors"),
                ("align", "ours.safetensors", "other.safetensors", "--out", "new.safetensors"),
            ),
            target,
        ),
        Scenario(
            "state dict", theirs, (("predict", "transformer_nfn", "theirs.pt", "--json"),),
            (Target("theirs.pt", pickled),),
        ),
        Scenario(
            "network predicted", theirs,
            (("predict", "transformer_nfn", "ours.safetensors", "--json"),),
            (Target("ours.safetensors", stored),),
        ),
        Scenario(
            "state dict inspected", theirs,
            (("inspect", "theirs.pt", "--json"),), (Target("theirs.pt", (*pickled, *unwrapped)),),
        ),
    ]  # fmt: skip


def _checkpoints() -> list[Scenario]:
    sizes = ("n_embd", "n_head", "n_layer", "vocab_size")
    hub = (
        Target("hub/config.json", (d.unreadable, d.field_of_wrong_type(sizes, ANSWERED))),
        Target(
            "hub/model.safetensors",
            (
                d.unreadable,
                tensor_damage.stored_tensor,
                tensor_damage.header_claims,
                d.safetensors_header(ANSWERED),
            ),
        ),
    )
    return [
        Scenario(
            "checkpoints compared", ("hub", "disguised"),
            (("compare", "hub", "disguised", "--json"), ("diff", "hub", "disguised", "--json")),
            hub[1:], answers=(0, 1, 3),
        ),
        Scenario(
            "checkpoint", ("hub", "disguised"),
            (
                ("inspect", "hub", "--json"), ("fingerprint", "hub", "disguised", "--json"),
                ("disguise", "hub", "--out", "new"), ("align", "hub", "disguised", "--out", "new"),
            ),
            hub[1:],
        ),
        Scenario(
            "mixture of experts", ("mixture",),
            (("inspect", "mixture", "--json"), ("disguise", "mixture", "--out", "new"),
             ("diff", "mixture", "mixture", "--json")),
            (
                Target("mixture/model.safetensors", (
                    tensor_damage.stored_tensor, tensor_damage.router, tensor_damage.expert_gone)),
                Target("mixture/config.json", (
                    d.field_of_wrong_type(("num_local_experts", "num_experts_per_tok"), ANSWERED),
                    d.field_set("num_local_experts", (1, 2, 4, 2**20)),
                    d.field_set("num_experts_per_tok", (0, 4, 2**20)),
                )),
            ),
        ),
        Scenario(
            "checkpoint's config", ("hub", "disguised"),
            (("inspect", "hub", "--json"), ("disguise", "hub", "--out", "new")),
            (Target("hub/config.json", (d.field_of_wrong_type(sizes, ANSWERED),
                                        d.field_set("model_type", d.NO_TEXT),
                                        d.json_text(ANSWERED), d.reformatted)),),
        ),
        Scenario(
            "GGUF", ("hub", "model.gguf"),
            (("inspect", "model.gguf", "--json"), ("disguise", "model.gguf", "--out", "new"),
             ("fingerprint", "model.gguf", "hub", "--json")),
            (Target("model.gguf", (d.unreadable, d.flipped(ANSWERED),
                                   d.flipped(ANSWERED, within=3000))),),
        ),
        Scenario(
            "GGUF compared", ("hub", "model.gguf"),
            (("compare", "hub", "model.gguf", "--json"), ("diff", "hub", "model.gguf", "--json")),
            (Target("model.gguf", (d.unreadable, d.flipped(ANSWERED, within=3000))),),
            answers=(0, 1, 3),
        ),
        Scenario(
            "GGUF of Llama", ("llama", "llama.gguf"),
            (("inspect", "llama.gguf", "--json"), ("disguise", "llama.gguf", "--out", "new"),
             ("compare", "llama", "llama.gguf", "--json")),
            (Target("llama.gguf", (d.cut, d.replaced(b"llama", b"llamb"), d.flipped(ANSWERED),
                                   d.flipped(ANSWERED, within=1000))),),
            answers=(0, 1, 3),
        ),
        *(_quantised(name, scales) for name, scales in (
            ("int8", (tensor_damage.scale, tensor_damage.zero_point)),
            ("float8", (tensor_damage.scale, tensor_damage.header_claims)),
            ("gptq", (tensor_damage.packed,)), ("packed", (tensor_damage.packed,)),
        )),
        Scenario(
            "ONNX", ("bert", "exported"),
            (("inspect", "exported/model.onnx", "--json"),
             ("disguise", "exported", "--out", "new"), ("compare", "bert", "exported", "--json")),
            (
                Target("exported/model.onnx", (
                    d.unreadable, d.cut, onnx_damage.graph, onnx_damage.graph,
                    d.flipped(ANSWERED))),
                Target("exported/model.onnx_data", (d.unreadable, d.cut)),
            ),
            answers=(0, 1, 3),
        ),
        Scenario(
            "adapter", ("hub", "bert", "adapter"),
            (("inspect", "adapter", "--json"),
             ("compare", "hub", "adapter", "--base", "hub", "--json"),
             ("compare", "adapter", "hub", "--base", "hub", "--json")),
            (
                Target("adapter/adapter_config.json", (
                    d.unreadable, d.json_text(ANSWERED), d.reformatted,
                    d.field_of_wrong_type(("peft_type",), ANSWERED))),
                Target("adapter/adapter_model.safetensors", (
                    d.unreadable, tensor_damage.stored_tensor, tensor_damage.header_claims,
                    d.safetensors_header(ANSWERED))),
            ),
            answers=(0, 1, 3),
        ),
        Scenario(
            "adapter's base", ("hub", "bert", "adapter"),
            (("fingerprint", "adapter", "--json"), ("disguise", "adapter", "--out", "new"),
             ("diff", "hub", "adapter", "--json")),
            (Target("adapter/adapter_config.json", (d.field_set("base_model_name_or_path", (
                "../bert", "../adapter", "..", "../nowhere", "hub", "org/nowhere", "hf:org/model",
                "org/model@../x", "org/model:../../config.json", "https://a.org/b", 3)),)),),
        ),
        Scenario(
            "hub's cache", ("hub", "home"),
            (("compare", "hub", "org/model", "--json"), ("diff", "org/model", "hub", "--json"),
             ("fingerprint", "hub", "hf:org/model@main", "--json")),
            (
                Target(f"{CACHED}/model.safetensors.index.json", (
                    d.other_bytes, d.field_set("weight_map", (
                        {"x": "../../../../../hub/model.safetensors"}, {"x": "/etc/passwd"},
                        {"x": "..\\x"}, {"x": 3}, {"x": "config.json"}, "x", None)))),
                Target(f"{CACHED}/model-00001-of-00002.safetensors", (d.unreadable, d.cut)),
            ),
            answers=(0, 1, 3),
        ),
        Scenario(
            "checkpoint's subfolder", ("hub", "disguised"), (("disguise", "hub", "--out", "new"),),
            (Target("hub/1_Pooling/config.json", (d.linked_out,)),),
        ),
        Scenario(
            "stated facts", ("encoder.pt",),
            (("inspect", "encoder.pt", "--json", *STATED),
             ("disguise", "encoder.pt", "--out", "new.pt", *STATED)),
            (Target("encoder.pt", (
                tensor_damage.pickled_tensor, tensor_damage.pickled_whole,
                tensor_damage.wrapped, tensor_damage.quantised_name)),),
        ),
        Scenario(
            "fingerprints", ("hub", "prints.parquet"),
            (("fingerprint", "hub", "--search", "prints.parquet", "--json"),),
            (Target("prints.parquet", (d.unreadable, d.flipped(ANSWERED), d.flipped(ANSWERED))),),
            varies=True,
        ),
        Scenario(
            "fingerprints added", ("hub", "prints.parquet"),
            (("fingerprint", "hub", "--add", "prints.parquet"),),
            (Target("prints.parquet", (d.flipped(ANSWERED),)),),
        ),
        Scenario(
            "pairs", ("models", "pairs.json"),
            (("compare", "--matrix", "models", "--out", "pairs.json", "--json"),),
            (Target("pairs.json", (
                d.something_else, d.json_text(ANSWERED), d.reformatted, d.field_of_wrong_type(
                    ("kind", "format", "pairs", "pairs/*"), ANSWERED))),),
            varies=True,  # it holds checksums of the files
        ),
        Scenario(
            "own family", ("hub", "own.toml"),
            (("architectures", "--architecture", "own.toml"),
             ("inspect", "hub", "--architecture", "own.toml", "--json")),
            (Target("own.toml", (d.flipped(ANSWERED), d.flipped(ANSWERED))),),
        ),
    ]  # fmt: skip


def _quantised(name: str, scales: tuple[d.Damager, ...]) -> Scenario:
    stored = (*scales, d.cut, d.answered(tensor_damage.stored_tensor),
              d.answered(d.safetensors_header(ANSWERED)))  # fmt: skip
    config = d.answered(d.field_set("quantization_config", (
        {"weight_block_size": [16]}, {"weight_block_size": [0, 24]}, {"weight_block_size": "x"},
        {"quant_method": []}, {"quant_method": "awq", "version": "x"}, {"quant_method": "gptq",
        "checkpoint_format": [3]}, [], 3,
    )))  # fmt: skip
    return Scenario(
        f"{name} weights", ("llama", name),
        (("inspect", name, "--json"), ("disguise", name, "--out", "new"),
         ("compare", "llama", name, "--json")),
        (Target(f"{name}/model.safetensors", stored), Target(f"{name}/config.json", (config,))),
        answers=(0, 1, 3),
    )  # fmt: skip


def _own_networks() -> list[Scenario]:
    words = ("zoo", "import", "own", "--targets", "own.csv", "--out", "imported")
    row, export = ("inspect", "ownzoo#1", "--json"), ("zoo", "export", "ownzoo", "--out", "files")
    stored = "ownzoo/networks/00001"
    return [
        Scenario(
            "own networks", ("own", "own.csv"), (words, (*words, "--json")),
            (
                Target("own.csv", (own_damage.table, own_damage.table, own_damage.table,
                                   import_damage.harmless_table, d.answered(d.unreadable))),
                Target("own/hub/model.safetensors", (
                    d.unreadable, tensor_damage.stored_tensor, d.safetensors_header(ANSWERED))),
            ),
        ),
        *(
            Scenario(
                f"own networks, {name}", ("own", name), (tuple(
                    name if word == "own.csv" else word for word in words),),
                (Target(name, (own_damage.typed_table, own_damage.typed_table, d.unreadable)),),
            )
            for name in ("own.parquet", "own.jsonl")
        ),
        Scenario(
            "own networks trained on", ("fleet",),
            tuple(("train", "fleet", "--model", model, "--target", target, "--seeds", "1",
                   "--epochs", "2", "--out", "r", "--json")
                  for model in ("invariant_mlp", "invariant_boosting", "whole_network")
                  for target in ("loss", "optimizer")),
            (
                Target("fleet/index.parquet", (own_damage.targets,) * 3),
                Target("fleet/networks/00001/model.safetensors", (d.flipped(REFUSED), d.cut)),
            ),
            varies=True,
        ),
        Scenario(
            "own predictor", ("runs/own", "llama", "hub", "bert", "net.safetensors"),
            (("predict", "own", "llama", "--json"),),
            (
                Target("llama", (own_damage.other_family,)),
                Target("llama/model.safetensors", (
                    d.unreadable, tensor_damage.stored_tensor, d.safetensors_header(ANSWERED))),
                Target("own/run.json", _json(("model", "zoo", "zoo/families", "seeds/0/seed",
                                              "format"), ("model", "zoo", "format"), ANSWERED)),
            ),
        ),
        Scenario(
            "zoo of own networks", ("ownzoo",), (row, export),
            (
                Target("ownzoo/index.parquet", (own_damage.index, own_damage.index)),
                Target("ownzoo/zoo.json", (d.unreadable, d.flipped(REFUSED))),
                Target("ownzoo/index.parquet", (d.unreadable, d.flipped(REFUSED))),
                Target(f"{stored}/model.safetensors", (d.unreadable, d.flipped(REFUSED))),
                Target(f"{stored}/config.json", (d.unreadable, d.flipped(REFUSED))),
            ),
        ),
    ]  # fmt: skip


def _imports() -> list[Scenario]:
    words = ("zoo", "import", "authors", "--out", "imported")
    zipped = ("zoo", "import", "authors.zip", "--out", "imported")
    first = "authors/mnist/run0_75_5000.pt"
    pickled = (
        d.something_else, tensor_damage.pickled_tensor, tensor_damage.pickled_whole,
        import_damage.file_name, d.flipped(ANSWERED, within=600),
    )  # fmt: skip
    table = (import_damage.table, import_damage.table, import_damage.harmless_table)
    return [
        Scenario("import", ("authors",), (words,), (Target(first, pickled),)),
        Scenario(
            "import's table", ("authors",), (words,),
            (Target("authors/metadata/mnist.csv", table),
             Target("authors", (import_damage.no_files,))),
        ),
        Scenario(
            "import's zip", ("authors.zip",), (zipped,),
            (Target("authors.zip", (import_damage.archive, import_damage.archive, d.unreadable,
                                    d.flipped(ANSWERED))),),
        ),
    ]  # fmt: skip


WORDS = Scenario(
    "words", ("net.safetensors", "other.safetensors", "ours.safetensors", "runs/statnn", "zoo",
              "hub", "bert", "adapter", "model.gguf", "encoder.pt", "authors"), (),
)  # fmt: skip
SCENARIOS: tuple[Scenario, ...] = (
    *_run_folders(), WORDS, *_reports(), *_zoos(), WORDS, *_networks(), *_checkpoints(), WORDS,
    *_imports(), *_own_networks(), WORDS,
)  # fmt: skip
