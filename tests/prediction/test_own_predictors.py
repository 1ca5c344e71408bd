"""Classes of users as predictors: they train, resume, predict and are refused in a sentence."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
from made_networks import (
    ABOUT,
    DEEP,
    MIXED_ABOUT,
    SIZES,
    WIDE,
    check_killed_and_resumed,
    experiment,
    groups,
    parts,
)
from own_models import EVERY
from safetensors.torch import load_file
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from xgboost import XGBRegressor

from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.errors import SpaceError
from transformer_nfn.models import Tabular, predictor
from transformer_nfn.models.own_module import declared
from transformer_nfn.models.predictor import find, names
from transformer_nfn.prediction import train
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predictors import (
    load_predictors,
    predictor_builder,
    seed_predictions,
)
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunError, read_predictions
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import Zoo

ZOO = Path(__file__).resolve().parents[2] / "assets" / "mnist-sample"
FILE = Path(own_models.__file__)
NIGHTLY = pytest.mark.nightly
every = pytest.mark.parametrize("own", EVERY, ids=lambda own: own.__name__)


@every
def test_it_trains_and_is_read_back(own: type[nn.Module], tmp_path: Path) -> None:
    data = parts()
    short = experiment(declared(own), (0, 1), protocol=Protocol(epochs=2))
    record = train_run(ABOUT, data, short, tmp_path)
    assert record.code["sha256"]
    found = read_predictions(tmp_path)
    again = seed_predictions(load_predictors(tmp_path, record), data.test)
    for seed, predicted in enumerate(again):
        chosen = (found["split"] == "test") & (found["seed"] == seed)
        assert torch.allclose(predicted, torch.from_numpy(found["predicted"][chosen]), atol=1e-6)
    assert train_run(ABOUT, data, short, tmp_path).summary == record.summary


@pytest.mark.parametrize("own", [each for each in EVERY if not hasattr(each, "fit")])
def test_a_killed_training_ends_with_the_same_weights(own: type, tmp_path: Path) -> None:
    data = parts()
    build = predictor_builder(declared(own), data.train, {})
    check_killed_and_resumed(build, data, Protocol(epochs=4, batch=16), tmp_path)


def test_a_seed_does_not_depend_on_the_others(tmp_path: Path) -> None:
    data, name = parts(), declared(own_models.Regularised)
    both, alone = (
        train_run(ABOUT, data, experiment(name, seeds, protocol=Protocol(epochs=2)), tmp_path / d)
        for d, seeds in (("both", (0, 1)), ("alone", (1,)))
    )
    assert both.seeds[1]["tau"] == pytest.approx(alone.seeds[0]["tau"])
    assert both.seeds[1]["mae"] == pytest.approx(alone.seeds[0]["mae"], abs=1e-6)


def test_several_sizes_are_trained_together(tmp_path: Path) -> None:
    name = declared(own_models.OwnProbes)
    record = train_run(
        MIXED_ABOUT, groups(), experiment(name, protocol=Protocol(epochs=1)), tmp_path
    )
    assert record.summary["widening"]["kind"] >= 1
    (fitted,) = load_predictors(tmp_path, record)
    assert fitted.misfit(SIZES[DEEP], SIZES[WIDE]) is None
    assert "3 classes, found 4" in fitted.misfit(replace(SIZES[DEEP], classes=4), SIZES[WIDE])
    other = declared(own_models.SetEncoder)
    with pytest.raises(RunError, match=f"'{other}' reads networks of one size"):
        train_run(MIXED_ABOUT, groups(), experiment(other), tmp_path / "refused")


def test_lazy_layers_of_any_view_are_read_back(tmp_path: Path) -> None:
    class LazyProbes(own_models.OwnProbes):
        def __init__(self, layout: dict[str, tuple[int, ...]]) -> None:
            super().__init__(layout)
            self.head = nn.LazyLinear(1)

    data, short = parts(), experiment(declared(LazyProbes), protocol=Protocol(epochs=1))
    record = train_run(ABOUT, data, short, tmp_path)
    found = read_predictions(tmp_path)
    again = seed_predictions(load_predictors(tmp_path, record), data.test)
    expected = torch.from_numpy(found["predicted"][found["split"] == "test"])
    assert torch.allclose(again[0], expected, atol=1e-6)


def test_the_layout_of_several_sizes_has_no_axis_that_differs() -> None:
    class Layouts(own_models.SetEncoder):
        any_size = True
        seen: dict[str, tuple[int | None, ...]]

        def __init__(self, layout: dict[str, tuple[int | None, ...]]) -> None:
            nn.Module.__init__(self)
            type(self).seen = layout
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.weight * next(iter(batch.values())).flatten(1).sum(1)

    predictor_builder(declared(Layouts), groups().train, {})()
    assert None in Layouts.seen["blocks.0.W_A"]
    first, second = (set(each.network.views) for each in groups().train)
    assert set(Layouts.seen) == first & second


def test_the_command_trains_predicts_and_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copy(FILE, tmp_path / "own.py")
    run, name = tmp_path / "run", f"{own}:SetEncoder"
    words = ("--model", name, "--option", "width=16", "--seeds", 1, "--epochs", 2, "--out", run)
    record = as_json("train", ZOO, *words)
    assert (record["model"], record["protocol"]["options"]) == (name, {"width": 16})
    for known in (name, str(own)):  # as in a new process
        monkeypatch.delitem(predictor._REGISTRY, known, raising=False)
    assert_refused("its code runs only with --trust", "predict", run, f"{ZOO}#0")
    assert_refused("its code runs only with --trust", "evaluate", run, ZOO)
    (row,) = as_json("predict", run, f"{ZOO}#0", "--trust")
    assert 0 < row["low"] < row["value"] < row["high"] < 1
    assert as_json("evaluate", run, ZOO, "--trust")["networks"] > 2
    printed("report", run, "--out", tmp_path / "report.html")
    assert "SetEncoder" in (tmp_path / "report.html").read_text()
    with Path(own).open("a") as file:
        file.write("print('imported')\n")
    monkeypatch.delitem(predictor._REGISTRY, name)
    assert_refused("was changed since the training", "predict", run, f"{ZOO}#0", "--trust")
    done = tnfn("train", ZOO, *words)
    assert (done.returncode, "holds another run" in done.stderr) == (2, True)
    done = tnfn("predict", run, f"{ZOO}#0", "--model", name, "--json")
    assert "is not what the run was trained with" in done.stderr
    assert "imported" in done.stderr
    assert "imported" not in done.stdout
    assert done.returncode == 0
    monkeypatch.delitem(predictor._REGISTRY, name)
    Path(own).unlink()
    assert_refused("is gone: name the class again", "predict", run, f"{ZOO}#0", "--trust")


def test_python_trains_a_class(tmp_path: Path) -> None:
    run = train(ZOO, own_models.SetEncoder, seeds=1, epochs=1, options={"width": 8})
    assert len(run.predict(f"{ZOO}#0-2")) == 3
    assert run.evaluate(ZOO)["networks"] > 2
    assert -1 <= run.tau <= 1


@pytest.mark.parametrize(
    ("reads", "estimator"),
    [
        pytest.param("statistics", RandomForestRegressor(n_estimators=5), marks=NIGHTLY),
        pytest.param("packed", Ridge(1e3), marks=NIGHTLY),
        pytest.param("invariants", make_pipeline(StandardScaler(), Ridge(10.0)), marks=NIGHTLY),
        ("statistics", XGBRegressor(n_estimators=5)),
    ],
    ids=["forest", "ridge", "pipeline", "xgboost"],
)
def test_an_estimator_is_trained_and_needs_no_trust(
    reads: str, estimator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(ZOO, Tabular(reads, estimator), seeds=2, out=tmp_path / "run")
    (here,) = run.predict(f"{ZOO}#0")
    monkeypatch.delitem(predictor._REGISTRY, run.record.model)  # as in a new process
    (row,) = as_json("predict", tmp_path / "run", f"{ZOO}#0")
    assert row["value"] == pytest.approx(here.value)
    assert as_json("evaluate", tmp_path / "run", ZOO)["networks"] > 2


@pytest.mark.parametrize("target", ["optimizer", "generalisation_gap", "learning_rate"])
def test_targets_of_every_type_are_learned(target: str, tmp_path: Path) -> None:
    run = train(ZOO, own_models.OnInvariants, target=target, seeds=1, epochs=1, out=tmp_path)
    (row,) = run.predict(f"{ZOO}#0")
    if target == "optimizer":
        assert row.label in row.labels
        assert sum(row.probabilities.values()) == pytest.approx(1)
    else:
        assert row.low <= row.value <= row.high
    assert run.evaluate(ZOO)["networks"] > 2


def test_a_zoo_of_several_sizes_by_the_command(mixed: Zoo, tmp_path: Path) -> None:
    name, run = f"{FILE}:OwnProbes", tmp_path / "run"
    record = as_json("train", mixed.path, "--model", name, "--seeds", 1, "--epochs", 1,
                     "--out", run)  # fmt: skip
    assert len(record["zoo"]["architectures"]) > 1
    assert len(as_json("evaluate", run, mixed.path, "--trust")["kinds"]) > 1


def test_an_installed_package_names_its_predictors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(FILE, tmp_path / "their_models.py")
    (about := tmp_path / "theirs-1.2.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(
        "[transformer_nfn.predictors]\nset_encoder = their_models:SetEncoder\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--model", "set_encoder", "--seeds", 1, "--epochs", 1, "--out", tmp_path / "run")
    assert as_json("train", ZOO, *words)["model"] == "set_encoder"
    assert "set_encoder" in printed("models", "set*")
    monkeypatch.delitem(predictor._REGISTRY, "set_encoder")  # as in a new process
    assert_refused("only with --trust", "predict", tmp_path / "run", f"{ZOO}#0")
    assert len(as_json("predict", tmp_path / "run", f"{ZOO}#0", "--trust")) == 1
    monkeypatch.delitem(predictor._REGISTRY, "set_encoder")
    sys.modules.pop("their_models")
    (other := tmp_path / "before").mkdir()
    (other / "their_models.py").write_text("print('imported')\n")
    monkeypatch.syspath_prepend(other)
    done = tnfn("predict", tmp_path / "run", f"{ZOO}#0", "--trust")
    assert f"'set_encoder' is now in '{other / 'their_models.py'}'" in done.stderr
    assert "imported" not in done.stderr + done.stdout


def test_a_class_of_an_interpreter_works_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {"__name__": "cell"}
    text = FILE.read_text().partition("class WeightGraph")[0]
    exec(compile(text, "<cell 1>", "exec"), scope)
    run = train(ZOO, scope["SetEncoder"], seeds=1, epochs=1, out=tmp_path / "run")
    assert len(run.predict(f"{ZOO}#0")) == 1
    monkeypatch.delitem(predictor._REGISTRY, run.record.model)
    assert_refused("typed into an interpreter", "predict", run.folder, f"{ZOO}#0", "--trust")


def test_a_class_of_a_module_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(FILE, package / "models.py")
    name = "their_package.models:Prepared"
    run = train(ZOO, name, seeds=1, epochs=1, out="run")
    assert run.record.code["file"] == str(package / "models.py")
    monkeypatch.delitem(predictor._REGISTRY, name)  # as in a new process
    for module in ("their_package", "their_package.models"):
        sys.modules.pop(module)
    assert_refused("its code runs only with --trust", "predict", "run", f"{ZOO}#0")
    assert len(as_json("predict", "run", f"{ZOO}#0", "--trust")) == 1
    (package / "models.py").write_text(FILE.read_text() + "\n")
    monkeypatch.delitem(predictor._REGISTRY, name)
    assert_refused("was changed since the training", "predict", "run", f"{ZOO}#0", "--trust")


@pytest.mark.nightly
def test_checkpoints_are_read_too(tmp_path: Path) -> None:
    own_zoo = Zoo.create(tmp_path / "zoo")
    for seed in range(24):
        path = write_example_checkpoint(tmp_path / f"net-{seed}", seed)
        config = json.loads((path / "config.json").read_text())
        own_zoo.add(
            load_file(path / "model.safetensors"), f"net-{seed}", config=config, strength=seed / 5
        )
    for own in (own_models.SetEncoder, own_models.Regularised, own_models.OnInvariants,
                own_models.FitsItself):  # fmt: skip
        run = train(own_zoo, own, target="strength", seeds=1, epochs=2, out=tmp_path / own.__name__)
        assert len(run.predict(f"{own_zoo.path}#0-1")) == 2


WRONG = {
    "Plain": ("class Plain: pass", "expected a class of torch.nn.Module, found the class Plain"),
    "silent": ("silent = 3", "expected a class of torch.nn.Module, found a int"),
    "NoReads": ("class NoReads(nn.Module): pass", "'reads' expected one of tensors, packed"),
    "Reads": ("class Reads(nn.Module): reads = 'pixels'", "expected one of tensors"),
    "Missing": ("", "has no 'Missing'"),
}
METHODS = {
    "raises in __init__": ("__init__", "raise ValueError('no width')", "ValueError in __init__"),
    "raises in forward": ("forward", "raise KeyError('W_A')", "KeyError in forward at line"),
    "wrong shape": ("forward", "return self.layer(batch)[:, 0][:, None, None]", "of [3, 1, 1] in"),
    "two numbers": ("forward", "return self.layer(batch)", "one number for each of 3 networks"),
    "integers": ("forward", "return self.layer(batch)[:, 0].long()", "tensor of [3] in int64"),
    "NaN": ("forward", "return self.layer(batch)[:, 0] * float('nan')", "expected finite numbers"),
    "infinity": ("forward", "return self.layer(batch)[:, 0] / 0", "expected finite numbers"),
    "no tensor": ("forward", "return 0.5", "found a float"),
    "none": ("forward", "return None", "found a NoneType"),
    "exits": ("forward", "import sys; sys.exit(0)", "SystemExit in forward"),
    "changes its input": ("forward", "batch.mul_(2); return self.layer(batch)[:, 0]", "changes"),
    "second batch": (
        "forward",
        "self.n = getattr(self, 'n', 0) + 1\n        assert self.n < 4, 'second'\n"
        "        return self.layer(batch)[:, 0]",
        "AssertionError in forward",
    ),
    "NaN later": (
        "loss", "return logits.sum() * float('nan')", "has a loss of nan in epoch 1",
    ),
    "loss of many": ("loss", "return logits", "expected a number as its loss"),
    "loss raises": ("loss", "raise RuntimeError('x')", "RuntimeError in loss"),
    "no optimiser": ("optimiser", "return 3", "expected a torch.optim.Optimizer"),
    "optimiser raises": ("optimiser", "raise RuntimeError('x')", "RuntimeError in optimiser"),
    "fit of any size": (
        "fit", "pass\n    any_size = True", "trains on networks of one size",
    ),
    "fit raises": ("fit", "raise RuntimeError('x')", "RuntimeError in fit"),
    "prepare raises": ("prepare", "raise RuntimeError('x')", "RuntimeError in prepare"),
    "an option": ("__init__", "pass\n    def __init__(self, layout, width): pass", "TypeError in"),
    "a property": ("forward", "pass\n    reads = property(len)", "'reads' expected one of"),
    "sizes in words": ("forward", "pass\n    any_size = 'yes'", "'any_size' expected bool"),
    "a list": ("forward", "pass\n    protocol = [3]", "'protocol' expected Mapping"),
    "unknown": ("forward", "pass\n    protocol = {'epoch': 3}", "found 'epoch'"),
    "negative": ("forward", "pass\n    protocol = {'batch': -3}", "batch expected a whole number"),
    "words": ("forward", "pass\n    protocol = {'lr': 'x'}", "not supported"),
    "title": ("forward", "pass\n    title = 3", "'title' expected str"),
    "zoos": ("forward", "pass\n    zoos = ('x',)", "'zoos' expected some of"),
    "no module": ("forward", "pass\n    def __new__(*a, **k): return 3", "of torch.nn.Module"),
    "fits NaN": ("fit", "nn.init.constant_(self.layer.weight, torch.nan)", "expected finite"),
    "detached": ("forward", "return self.layer(batch)[:, 0].detach()", "depends on its parameters"),
    "constant loss": ("loss", "return torch.tensor(0.5)", "depends on its parameters"),
    "while training": (
        "forward", "assert not self.training; return self.layer(batch)[:, 0]", "AssertionError in",
    ),
    "prepares one": ("prepare", "return batch[:1]", "one number for each of 3 networks"),
    "prepares none": ("prepare", "return None", "from prepare, found a NoneType"),
    "prepares a list": ("prepare", "return [batch]", "from prepare, found a list"),
    "infinite later": (
        "forward",
        "y = self.layer(batch)[:, 0]; return y if self.training or len(y) < 4 else y / 0",
        "for the validation networks, found",
    ),
    "error without text": (
        "forward",
        "class Own(Exception):\n            __str__ = None\n        raise Own",
        "raised Own in forward at line",
    ),
    "generator": ("forward", "yield 3", "found a generator"),
}  # fmt: skip
ARGUMENTS = {"__init__": "self, layout", "forward": "self, batch", "loss": "self, logits, target",
             "optimiser": "self, rate", "fit": "self, train, val", "prepare": "batch"}  # fmt: skip
BASE = """
class {name}(nn.Module):
    reads = "statistics"
    def __init__(self, layout):
        super().__init__()
        (shape,) = layout.values()
        self.layer = nn.Linear(shape[0], 2)
    def forward(self, batch):
        return self.layer(batch)[:, 0]
    {static}
    def {method}({arguments}):
        {body}
"""


def test_wrong_classes_are_one_sentence_each(tmp_path: Path) -> None:
    """In one process, as the errors of a command are those of the function."""
    text = "import torch\nfrom torch import nn\n" + "\n".join(code for code, _ in WRONG.values())
    expected = {name: message for name, (_, message) in WRONG.items()}
    for number, (method, body, message) in enumerate(METHODS.values()):
        name = f"Wrong{number}"
        expected[name] = message
        static = "@staticmethod" if method == "prepare" else ""
        text += BASE.format(
            name=name, method=method, arguments=ARGUMENTS[method], body=body, static=static
        )
    (file := tmp_path / "wrong.py").write_text(text)
    for name, message in expected.items():
        out = tmp_path / name
        with pytest.raises(RunError) as caught:
            train(ZOO, f"{file}:{name}", seeds=1, epochs=2, out=out)
        assert message in str(caught.value), name
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
        assert not (out / "run.json").exists()


def test_the_traceback_of_a_wrong_class_is_printed_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "own.py").write_text(
        "from torch import nn\nclass Own(nn.Module):\n    reads = 'packed'\n"
        "    def __init__(self, layout):\n        print('built')\n        raise ValueError('no')\n"
    )
    words = ("train", ZOO, "--model", f"{file}:Own", "--out", tmp_path / "run")
    sentence = f"error: '{file}:Own' raised ValueError in __init__ at line 6 of 'own.py': no\n"
    done = tnfn(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"built\n{sentence}")
    monkeypatch.setenv("TNFN_TRACEBACK", "1")
    done = tnfn(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "line 6, in __init__" in done.stderr
    assert done.stderr.endswith(sentence)


@pytest.mark.parametrize("model", [name for name in names("built") if find(name).code is None])
def test_options_that_a_predictor_does_not_take_are_one_sentence(
    model: str, tmp_path: Path
) -> None:
    for option in ({"nonsense": 1}, {"hidden": "x"}, {"channels": [None]}, {"channels": 2.5}):
        with pytest.raises((RunError, SpaceError)) as caught:
            predictor_builder(model, parts().train, option)()
        assert "\n" not in str(caught.value)


def test_what_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.py").write_text("class A(:\n")
    (raising := tmp_path / "raising.py").write_text("x = 1\n1 / 0\n")
    for reference, message in {
        f"{broken}:A": "SyntaxError while it was imported",
        f"{raising}:A": "ZeroDivisionError while it was imported at line 2 of 'raising.py'",
        f"{tmp_path}/none.py:A": "there is no file",
        "no_such_module:A": "ModuleNotFoundError",
        "own.py": "there is no model 'own.py'",
        ":A": "expected FILE.py:CLASS or MODULE:CLASS",
    }.items():
        with pytest.raises(RunError, match=message):
            train(ZOO, reference, out=tmp_path / "run")
    assert_refused(
        "--option expected NAME=VALUE", "train", ZOO, "--option", "width", "--out", tmp_path / "run"
    )
    name = f"{FILE}:SetEncoder"
    assert_refused(
        "TypeError in __init__", "train", ZOO, "--model", name, "--option", "depth=3", "--out",
        tmp_path / "run",
    )  # fmt: skip
    assert find(declared(name)).title == "SetEncoder"
