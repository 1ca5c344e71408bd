"""A training is the same one only if every weight of every network is."""

from dataclasses import replace

import pytest
import torch
from made_networks import ABOUT, experiment, parts

from transformer_nfn.models import Batch
from transformer_nfn.prediction.data import SizeGroups
from transformer_nfn.prediction.experiment import train_run, training_identity
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunError

DATA = parts(24, 8, 8)
SHORT = experiment("mlp", protocol=Protocol(epochs=2))


def identity(data=DATA, **changes):
    return training_identity(replace(SHORT, **changes), SizeGroups.of(data))


def with_one_number_changed(data, part, name):
    """The same networks except for the last number of one tensor of one network."""
    chosen = getattr(data, part)
    network = chosen.network.map(torch.clone)
    last = network.views[name][-1].view(-1)
    last[-1] = torch.nextafter(last[-1], torch.tensor(9.0))
    return replace(data, **{part: replace(chosen, network=network)})


def test_every_tensor_counts():
    names = sorted(DATA.train.network.views)
    seen = {identity()}
    for part in ("train", "val", "test"):
        seen |= {identity(with_one_number_changed(DATA, part, name)) for name in names}
    assert len(seen) == 1 + 3 * len(names)


def test_accuracies_settings_and_seeds_count_and_the_order_of_tensors_does_not():
    other = replace(DATA.val, accuracy=DATA.val.accuracy.clone())
    other.accuracy[0] += 0.01
    seen = {
        identity(),
        identity(replace(DATA, val=other)),
        identity(replace(DATA, more=DATA.val)),
        identity(model="statnn"),
        identity(options={"hidden": 3}),
        identity(protocol=Protocol(epochs=3)),
        identity(seeds=[0, 1]),
    }
    assert len(seen) == 7
    turned = Batch.of(dict(reversed(DATA.train.network.views.items())))
    assert identity(replace(DATA, train=replace(DATA.train, network=turned))) == identity()


def test_a_run_on_other_weights_of_the_same_accuracy_is_another_run(tmp_path):
    train_run(ABOUT, DATA, SHORT, tmp_path)
    moved = with_one_number_changed(DATA, "train", "classifier.W_1")
    with pytest.raises(RunError, match="holds another run"):
        train_run(ABOUT, moved, SHORT, tmp_path)
