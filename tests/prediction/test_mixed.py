"""One predictor for networks of several sizes: training, commands, and the table of sizes."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from made_networks import (
    ABOUT,
    DEEP,
    MIXED_ABOUT,
    SMALL,
    WIDE,
    assert_fields_are_checked,
    check_killed_and_resumed,
    experiment,
    groups,
    made,
    parts,
    same_weights,
)
from safetensors.torch import save_file
from scipy.stats import kendalltau

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.models.whole_network import model
from transformer_nfn.prediction.data import FRACTIONS, SizeGroups
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunError, RunRecord, read_predictions
from transformer_nfn.prediction.training import SeedTrainer, seed_orders, train_seeds
from transformer_nfn.prediction.training_set import TrainingDigests
from transformer_nfn.prediction.uncertainty import UNMEASURED

SHORT = Protocol.of("whole_network", epochs=3, batch=16)
CPU = torch.device("cpu")
WHOLE = experiment("whole_network", (0, 1), protocol=SHORT, options=SMALL)


@pytest.fixture(autouse=True, scope="module")
def _short_epochs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "MIN_EPOCH", 90)
        yield


def trainer(data, seeds=(0,), epoch=0):
    build = predictor_builder("whole_network", SizeGroups.of(data).train[0], SMALL)
    made_trainer = SeedTrainer(build, data, SHORT, list(seeds), together=True)
    made_trainer.epoch = epoch
    return made_trainer


def builder(data):
    return predictor_builder("whole_network", data.train[0], SMALL)


def test_one_size_of_a_mixed_zoo_is_trained_as_its_zoo_alone(tmp_path):
    data = replace(parts(), more=replace(made(20, 5), columns=made(20).columns))
    plain = train_run(ABOUT, data, WHOLE, tmp_path / "plain")
    mixed = train_run(MIXED_ABOUT, SizeGroups({WIDE: data}), WHOLE, tmp_path / "mixed")
    for seed in ("seed-0", "seed-1"):
        files = [tmp_path / run / seed / "model.safetensors" for run in ("plain", "mixed")]
        assert files[0].read_bytes() == files[1].read_bytes()
    ours, theirs = (read_predictions(tmp_path / run) for run in ("mixed", "plain"))
    assert set(ours) - set(theirs) == {"kind"}
    assert all(ours[key].tolist() == theirs[key].tolist() for key in theirs)
    for key in ("tau", "tau_se", "r2", "mae", "coverage", "radius"):
        assert mixed.summary[key] == plain.summary[key]
    assert mixed.summary["kinds"][WIDE]["tau"] == plain.summary["tau"]
    assert mixed.summary["widening"] == {}


def test_every_batch_has_one_size_and_every_network_comes_before_any_again():
    data = groups()
    held = trainer(data, (0, 1), epoch=2)
    assert held.per_epoch == [60, 30]
    batches, rates = held.epoch_plan()
    assert held.steps_per_epoch == len(batches) == len(rates) == 4 + 2
    for group, size, count in ((0, 40, 60), (1, 20, 30)):
        picks = torch.cat([batch.picks for batch in batches if batch.group == group], 1)
        assert picks.shape == (2, count)
        assert sorted(picks[0, :size].tolist()) == list(range(size))
        assert not torch.equal(picks[0], picks[1])
    alone = trainer(data, (1,), epoch=2).epoch_plan()[0]
    for ours, theirs in zip(batches, alone, strict=True):
        assert ours.group == theirs.group
        assert torch.equal(ours.picks[1], theirs.picks[0])
    turns = {tuple(b.group for b in trainer(data, epoch=e).epoch_plan()[0]) for e in range(4)}
    assert len(turns) > 1
    assert not torch.equal(*seed_orders([20, 20], [20, 20], 0, 0, CPU))


def test_invariants_and_the_best_epoch_are_of_all_sizes_together():
    data = groups()
    held = trainer(data)
    list(held.start())
    rows = torch.cat([part.network.computed["invariants"] for part in held.train])
    assert torch.allclose(held.modules[0].mean, rows.double().mean(0).float(), atol=1e-5)
    held.train_epoch()
    (tau,) = held.select()
    predicted = torch.cat([held.predict(group)[0] for group in range(len(data.val))])
    truth = torch.cat([part.accuracy for part in data.val])
    assert tau == pytest.approx(kendalltau(truth, predicted).statistic)


@pytest.mark.nightly
def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data = groups()
    check_killed_and_resumed(builder(data), data, SHORT, tmp_path)


class Untouchable:
    """Raises where anything of it is read."""

    def __getattribute__(self, name):
        raise AssertionError(f"read '{name}' of networks left out")


def test_networks_left_out_are_not_read_in_training():
    data = groups(left_out=(DEEP,))
    without = train_seeds(builder(data), data, SHORT, [0])
    hidden = replace(data, left_out={DEEP: Untouchable()})
    assert same_weights(train_seeds(builder(data), hidden, SHORT, [0]).modules, without.modules)


def test_a_record_reports_every_size_and_those_left_out(tmp_path):
    data = groups(left_out=(DEEP,))
    record = train_run(MIXED_ABOUT, data, WHOLE, tmp_path / "run")
    assert record.selection["left_out"] == [DEEP]
    assert record.selection["kinds"][WIDE] == {"train": 40, "val": 12, "test": 12}
    assert list(record.summary["kinds"]) == [WIDE]
    assert record.summary["left_out"][DEEP]["networks"] == 15
    again = RunRecord.read(tmp_path / "run")
    assert again.architectures == [MIXED_ABOUT["architectures"][WIDE]]
    columns = read_predictions(tmp_path / "run")
    out = columns["split"] == "left_out"
    assert set(columns["kind"][out]) == {DEEP}
    assert out.sum() == 2 * 15
    radius = min(1.0, record.summary["radius"] * UNMEASURED)  # one size measures nothing of others
    mean = columns["predicted"][out].reshape(2, 15).mean(0)
    covered = np.abs(data.left_out[DEEP].truth - mean) <= radius
    assert record.summary["left_out"][DEEP]["coverage"] == pytest.approx(covered.mean())
    digests = TrainingDigests.load(tmp_path / "run")
    assert set(digests.standings(data.left_out[DEEP], "digits")) == {"unseen"}
    assert set(digests.standings(data.train[0], "digits")) == {"trained"}
    assert_fields_are_checked(tmp_path / "run", tmp_path / "copy")


def test_a_predictor_of_one_size_is_rejected(tmp_path):
    for name in ("mlp", "transformer_nfn", "invariant_boosting"):
        with pytest.raises(RunError, match=f"'{name}' reads networks of one size: of a mixed zoo"):
            train_run(MIXED_ABOUT, groups(), experiment(name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Through the commands.

FLAT, BROAD, TALL = "w16-h4-d1", "w20-h2-d1", "w16-h4-d2"


@pytest.fixture(scope="module")
def run(mixed, tmp_path_factory):
    """Trained on two sizes; the deep one is left out."""
    out = tmp_path_factory.mktemp("run") / "run"
    words = ("train", mixed.path, "--out", out, "--leave-out", TALL, "--seeds", 1)
    return out, as_json(*words, "--epochs", 2, "--device", "cpu")


def test_the_command_reports_every_size(mixed, run):
    out, record = run
    assert list(record["summary"]["kinds"]) == [FLAT, BROAD]
    assert list(record["summary"]["left_out"]) == [TALL]
    assert set(record["summary"]["widening"]) == {"kind", "d_model", "d_ff", "heads"}
    tested = sum(found["networks"] for found in record["summary"]["kinds"].values())
    assert record["selection"]["test"] == tested
    left_out = mixed.parts[TALL].select(percent=75)
    assert record["summary"]["left_out"][TALL]["networks"] == len(left_out)
    assert f"{TALL}, left out" in printed("evaluate", out)


def test_an_unseen_size_has_a_warning_and_a_wider_interval(mixed, run):
    out, record = run
    seen, unseen = predict(out, [f"{mixed.path}/{FLAT}#0", f"{mixed.path}/{TALL}#0"])
    radius = record["summary"]["radius"]
    assert "never seen in training" not in (seen.warning or "")
    assert "networks of 2 blocks were never seen in training" in unseen.warning
    # All sizes in training have one depth, so nothing was measured.
    assert "was not measured" in unseen.warning
    for found, half in ((seen, radius), (unseen, min(1.0, UNMEASURED * radius))):
        assert found.low == pytest.approx(max(0.0, found.value - half))
        assert found.high == pytest.approx(min(1.0, found.value + half))


@pytest.mark.nightly
def test_evaluate_takes_a_mixed_zoo(mixed, run):
    out, record = run
    found = evaluate(out, mixed.path)
    assert list(found["kinds"]) == [FLAT, BROAD, TALL]
    assert found["trained_on"] == record["selection"]["train"]
    assert found["kinds"][TALL]["trained_on"] == 0 == found["kinds"][TALL]["selected_by"]
    left_out = record["summary"]["left_out"][TALL]
    assert found["kinds"][TALL]["tau"] == pytest.approx(left_out["tau"])
    assert found["kinds"][TALL]["coverage"] == pytest.approx(left_out["coverage"])
    assert f"1 of 3 kinds of networks were never seen in training ({TALL})" in found["warning"]
    assert found["networks"] == sum(size["networks"] for size in found["kinds"].values())
    one = evaluate(out, mixed.path / TALL)
    assert one["tau"] == found["kinds"][TALL]["tau"]
    assert "networks of 2 blocks" in one["warning"]
    assert f"{BROAD}, never seen" in printed("evaluate", out, mixed.path)


def test_another_task_is_rejected(mixed, run, tmp_path):
    path = tmp_path / "net.safetensors"
    weights = {name: w[0].contiguous() for name, w in mixed.parts[FLAT].weights([0]).items()}
    save_file(weights | {"classifier.b_2": weights["classifier.b_2"][:4].clone()}, path)
    with pytest.raises(RunError, match="of another architecture: expected 10 classes, found 4"):
        predict(run[0], str(path))
    assert_refused("expected 4 pixels in a patch, found 16", "predict", run[0], "mnist-sample#0")


def test_what_cannot_be_trained_is_rejected(mixed, tmp_path):
    out = tmp_path / "run"
    for message, *words in (
        ("'mlp' reads networks of one size", "--model", "mlp"),
        ("fitted to one size, not several", "--damaged", "x"),
        ("'w9-h3-d1'", "--leave-out", "w9-h3-d1"),
        ("no size left to train on: 3 are left out", "--leave-out", f"{FLAT},{BROAD},{TALL}"),
        ("''", "--leave-out", ""),
    ):
        assert_refused(message, "train", mixed.path, "--out", out, *words)
    assert not out.exists()


@pytest.mark.nightly
def test_the_table_of_a_mixed_zoo(mixed, tmp_path):
    words = ("reproduce", "mixed", mixed.path, "--out", tmp_path, "--seeds", 1)
    words += ("--epochs", 1, "--leave-out", BROAD, "--device", "cpu")
    printed(*words)
    text = (tmp_path / "mixed.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert {FLAT, BROAD, TALL, "all kinds", "within kinds"} <= set(rows)
    cells = [cell.strip() for cell in rows[BROAD].split("|")[2:-1]]
    rows_at_75 = mixed.parts[BROAD].select(percent=75)
    assert cells[0] == str(len(mixed.parts[BROAD].split(rows_at_75, FRACTIONS)[2]))
    assert cells[3] == str(len(rows_at_75))
    assert cells[5].endswith("%")
    assert rows[FLAT].split("|")[5].strip() == "–"
    table = pq.read_table(tmp_path / "mixed.parquet").to_pylist()
    found = {(row["row"], row["column"]): row["tau"] for row in table if row["seed"] is None}
    record = RunRecord.read(tmp_path / "cells" / f"mixed-{BROAD}-left_out")
    assert found[BROAD, "left_out"] == record.summary["left_out"][BROAD]["tau"]
    whole = RunRecord.read(tmp_path / "cells" / "mixed-allkinds-whole_network")
    assert found["all kinds", "whole_network"] == whole.summary["tau"]
    assert found[TALL, "whole_network"] == whole.summary["kinds"][TALL]["tau"]
    assert found["within kinds", "whole_network"] == whole.summary["tau_within"]
    # Finished cells are read, and a report shows the table.
    assert as_json(*words)[0]["summary"]["tau"] == whole.summary["tau"]
    page = tmp_path / "report.html"
    printed("report", tmp_path, "--out", page)
    assert "Whole network, kind left out" in page.read_text()


def test_a_table_of_sizes_needs_a_mixed_zoo(mixed, tmp_path):
    for words, message in (
        (["mixed", str(mixed.path / FLAT)], "mixed is about a mixed zoo"),
        (["mixed", mixed.path, "--leave-out", "w9-h3-d1"], "'w9-h3-d1'"),
        (["table1", str(mixed.path / FLAT), "--leave-out", FLAT], "--leave-out is for mixed"),
    ):
        assert_refused(message, "reproduce", *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
