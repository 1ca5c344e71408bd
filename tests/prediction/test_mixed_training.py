"""One predictor over networks of several kinds: what each step sees, killed or not, left out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from killed_training import kill_in_epoch
from made_kinds import ABOUT, DEEP, WIDE, kinds, networks
from made_networks import ABOUT as PLAIN_ABOUT
from made_networks import made, parts

from transformer_nfn.models import map_network
from transformer_nfn.prediction import manner, probe_search
from transformer_nfn.prediction.batches import epoch_batches, seed_orders
from transformer_nfn.prediction.identity import training_identity
from transformer_nfn.prediction.kinds import as_kinds
from transformer_nfn.prediction.predictors import module_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunError, RunRecord, read_predictions
from transformer_nfn.prediction.runs import train_run
from transformer_nfn.prediction.trained_on import TrainedOn
from transformer_nfn.prediction.training import SeedTrainer, train_seeds

SMALL = {"probes": 6, "rank": 4, "hidden": 8}
SHORT = Protocol.of("whole_network", epochs=3, batch=16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch):
    monkeypatch.setattr(manner, "SHORTEST_EPOCH", 90)


def builder(data):
    return module_builder("whole_network", as_kinds(data).train[0], SMALL)


def same_weights(ours, theirs):
    pairs = zip(ours.modules, theirs.modules, strict=True)
    return all(
        torch.equal(value, b.state_dict()[name])
        for a, b in pairs
        for name, value in a.state_dict().items()
    )


# One kind is the case of a list of length one, to the last digit.


def test_one_kind_has_the_order_it_always_had():
    for seed, epoch in ((0, 0), (3, 7)):
        source = torch.Generator().manual_seed((seed + 1) * 1_000_003 + epoch)
        literal = torch.cat([torch.randperm(40, generator=source) for _ in range(3)])[:100]
        batches = epoch_batches([40], [100], 16, [seed], epoch, CPU)
        assert torch.equal(torch.cat([batch.picks for batch in batches], 1)[0], literal)
        assert [batch.picks.shape[1] for batch in batches] == [16] * 6 + [4]


def test_one_kind_is_asked_by_the_probe_search_as_if_there_were_no_others():
    accuracy = made(50).accuracy
    source = torch.Generator().manual_seed(5)
    chance = (accuracy / accuracy.max()) ** 6 + 1e-3
    literal = [torch.multinomial(chance, 8, generator=source)[None] for _ in range(7)]
    drawn = probe_search._draws([accuracy], 7, 5, groups=1, asked=8)
    assert [kind for kind, _ in drawn] == [0] * 7
    assert all(torch.equal(a, b) for (_, a), b in zip(drawn, literal, strict=True))


def test_one_kind_of_a_mixed_zoo_is_trained_as_its_zoo_alone(tmp_path):
    data = replace(parts(), more=replace(made(20, 5), columns=made(20).columns))
    named = replace(as_kinds(data), names=(WIDE,))
    short = Protocol.of("whole_network", epochs=2, batch=16)
    options = {"seeds": [0, 1], "protocol": short, "options": {**SMALL, "probes": 4}}
    plain = train_run(PLAIN_ABOUT, data, "whole_network", tmp_path / "plain", **options)
    mixed = train_run(ABOUT, named, "whole_network", tmp_path / "mixed", **options)
    for seed in ("seed-0", "seed-1"):
        files = [tmp_path / run / seed / "model.safetensors" for run in ("plain", "mixed")]
        assert files[0].read_bytes() == files[1].read_bytes()
    ours, theirs = (read_predictions(tmp_path / run) for run in ("mixed", "plain"))
    assert set(ours) - set(theirs) == {"kind"}
    assert all(ours[key].tolist() == theirs[key].tolist() for key in theirs)
    told = ("tau", "tau_se", "r2", "mae", "coverage", "radius")
    assert [mixed.summary[key] for key in told] == [plain.summary[key] for key in told]
    assert mixed.summary["kinds"][WIDE]["tau"] == plain.summary["tau"]
    assert mixed.summary["widening"] == {}


# Several kinds.


def test_every_batch_is_of_one_kind_and_every_network_comes_before_any_again():
    batches = epoch_batches([40, 20], [60, 30], 16, [0, 1], 2, CPU)
    assert {batch.picks.shape[0] for batch in batches} == {2}
    for kind, size, count in ((0, 40, 60), (1, 20, 30)):
        picks = torch.cat([batch.picks for batch in batches if batch.kind == kind], 1)
        assert picks.shape == (2, count)
        assert sorted(picks[0, :size].tolist()) == list(range(size))
        assert not torch.equal(picks[0], picks[1])
    turns = [[b.kind for b in epoch_batches([40, 20], [60, 30], 16, [0], e, CPU)] for e in range(8)]
    assert all(sorted(turn) == [0, 0, 0, 0, 1, 1] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1


def test_a_seed_has_its_order_whatever_its_company():
    together = epoch_batches([40, 20], [40, 20], 16, [3, 4], 1, CPU)
    alone = epoch_batches([40, 20], [40, 20], 16, [4], 1, CPU)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.kind == theirs.kind
        assert torch.equal(ours.picks[1], theirs.picks[0])
    assert not torch.equal(*seed_orders([20, 20], [20, 20], 0, 0, CPU))


def test_an_epoch_takes_kinds_by_how_many_runs_they_have():
    data = kinds()
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=True)
    assert trainer.per_epoch == [60, 30]
    assert trainer.steps_per_epoch == len(trainer.epoch_plan()[0]) == 4 + 2
    assert len(trainer.epoch_rates()) == 6


def test_invariants_are_standardised_over_all_kinds():
    data = kinds()
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=True)
    list(trainer.begin())
    module = trainer.modules[0]
    rows = torch.cat([part.network["invariants"] for part in trainer.kinds.train])
    assert torch.allclose(module.mean, rows.double().mean(0).float(), atol=1e-5)


def test_the_best_epoch_is_that_of_all_validation_networks_together():
    from scipy.stats import kendalltau

    data = kinds()
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=True)
    list(trainer.begin())
    trainer.train_epoch()
    (tau,) = trainer.select()
    said = torch.cat([trainer.predict(kind)[0] for kind in range(len(data.val))])
    truth = torch.cat([part.accuracy for part in data.val])
    assert tau == pytest.approx(kendalltau(truth, said).statistic)


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data = kinds()
    whole = train_seeds(builder(data), data, SHORT, [0, 1])
    kill_in_epoch(2, builder(data), data, SHORT, tmp_path)
    resumed = train_seeds(builder(data), data, SHORT, [0, 1], folder=tmp_path, identity="x")
    assert same_weights(resumed, whole)
    assert resumed.best_epoch == whole.best_epoch


class Untouchable:
    """Raises where anything of it is looked at."""

    def __getattribute__(self, name):
        raise AssertionError(f"looked at '{name}' of networks left out")


def test_networks_left_out_are_not_looked_at():
    data = kinds(left_out=(DEEP,))
    without = train_seeds(builder(data), data, SHORT, [0])
    hidden = replace(data, left_out={DEEP: Untouchable()})
    assert same_weights(train_seeds(builder(data), hidden, SHORT, [0]), without)


def test_a_record_tells_every_kind_and_those_left_out(tmp_path):
    data = kinds(left_out=(DEEP,))
    options = {"seeds": [0, 1], "protocol": SHORT, "options": SMALL}
    record = train_run(ABOUT, data, "whole_network", tmp_path / "run", **options)
    assert record.selection["left_out"] == [DEEP]
    assert record.selection["kinds"][WIDE] == {"train": 40, "val": 12, "test": 12}
    assert list(record.summary["kinds"]) == [WIDE]
    assert record.summary["left_out"][DEEP]["networks"] == 15
    again = RunRecord.read(tmp_path / "run")
    assert again.architectures == [ABOUT["architectures"][WIDE]]
    columns = read_predictions(tmp_path / "run")
    out = columns["split"] == "left_out"
    assert set(columns["kind"][out]) == {DEEP}
    assert out.sum() == 2 * 15
    reach = record.radius * 3.0  # one kind tells nothing of others
    mean = columns["predicted"][out].reshape(2, 15).mean(0)
    held = np.abs(data.left_out[DEEP].accuracy.double().numpy() - mean) <= min(1.0, reach)
    assert record.summary["left_out"][DEEP]["coverage"] == pytest.approx(held.mean())
    marks = TrainedOn.load(tmp_path / "run")
    assert set(marks.standings(data.left_out[DEEP], "digits")) == {"unseen"}
    assert set(marks.standings(data.train[0], "digits")) == {"trained"}


def test_other_networks_left_out_are_another_run_and_the_same_are_the_same(tmp_path):
    data = kinds(left_out=(DEEP,))
    other = replace(data, left_out={DEEP: networks(DEEP, 15, 4)})
    identity = [training_identity("whole_network", {}, x, SHORT, [0]) for x in (data, other)]
    assert identity[0] != identity[1]
    moved = map_network(data.train[0].network, torch.clone)
    same = replace(data, train=[replace(data.train[0], network=moved)])
    assert training_identity("whole_network", {}, same, SHORT, [0]) == identity[0]


def test_what_reads_one_size_alone_is_refused(tmp_path):
    for model in ("mlp", "transformer_nfn", "invariant_boosting"):
        with pytest.raises(RunError, match=f"'{model}' reads networks of one size: of a mixed zoo"):
            train_run(ABOUT, kinds(), model, tmp_path / "run", seeds=[0])
    assert not (tmp_path / "run").exists()
