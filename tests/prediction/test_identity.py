"""A training is the same one only if every weight of every network is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from made_networks import ABOUT, parts
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_nfn.models import map_network, tensors_of
from transformer_nfn.prediction.identity import training_identity
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.runs import train_run
from transformer_nfn.prediction.training import STATE_FILE

SHORT = Protocol(epochs=2)
DATA = parts(24, 8, 8)


def identity(data):
    return training_identity("mlp", {}, data, SHORT, [0])


def with_one_number_changed(data, part, name):
    """The same networks but for the last number of one tensor of one network."""
    chosen = getattr(data, part)
    network = map_network(chosen.network, torch.clone)
    flat = tensors_of(network)[name].view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
    return replace(data, **{part: replace(chosen, network=network)})


@pytest.mark.parametrize("name", sorted(tensors_of(DATA.train.network)))
def test_every_tensor_counts(name):
    seen = {identity(DATA)}
    seen |= {identity(with_one_number_changed(DATA, part, name)) for part in ("train", "val")}
    seen.add(identity(with_one_number_changed(DATA, "test", name)))
    assert len(seen) == 4


def test_accuracies_settings_and_seeds_count_and_the_order_of_tensors_does_not():
    other = replace(DATA.val, accuracy=DATA.val.accuracy.clone())
    other.accuracy[0] += 0.01
    seen = {
        identity(DATA),
        identity(replace(DATA, val=other)),
        training_identity("statnn", {}, DATA, SHORT, [0]),
        training_identity("mlp", {"hidden": 3}, DATA, SHORT, [0]),
        training_identity("mlp", {}, DATA, Protocol(epochs=3), [0]),
        training_identity("mlp", {}, DATA, SHORT, [0, 1]),
    }
    assert len(seen) == 6
    network = DATA.train.network
    turned = {part: network[part] for part in reversed(list(network))}
    turned["blocks"] = [dict(reversed(block.items())) for block in network["blocks"]]
    assert identity(replace(DATA, train=replace(DATA.train, network=turned))) == identity(DATA)


def test_a_run_on_other_weights_of_the_same_accuracy_is_another_run(tmp_path):
    how = dict(seeds=[0], protocol=SHORT)
    train_run(ABOUT, DATA, "mlp", tmp_path, **how)
    moved = with_one_number_changed(DATA, "train", "classifier.W_1")
    with pytest.raises(RunError, match="holds another run"):
        train_run(ABOUT, moved, "mlp", tmp_path, **how)


def older_digest(data):
    """What records of earlier versions hold: accuracies, and ``W_Q`` of the first block."""
    about = {"model": "mlp", "options": {}, "protocol": SHORT.to_json(), "seeds": [0]}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for part in (data.train, data.val, data.test):
        digest.update(part.accuracy.numpy().tobytes())
        digest.update(part.network["blocks"][0]["W_Q"].numpy().tobytes())
    return digest.hexdigest()[:16]


def test_a_finished_run_of_an_earlier_version_is_read_not_trained_again(tmp_path):
    how = dict(seeds=[0], protocol=SHORT)
    done = train_run(ABOUT, DATA, "mlp", tmp_path, **how)
    protocol = {k: v for k, v in done.protocol.items() if k != "identity"}
    older = replace(done, protocol=protocol | {"fingerprint": older_digest(DATA)})
    older.write(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert train_run(ABOUT, DATA, "mlp", tmp_path, **how).protocol == older.protocol
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    moved = with_one_number_changed(DATA, "val", "blocks.0.W_Q")
    with pytest.raises(RunError, match="holds another run"):
        train_run(ABOUT, moved, "mlp", tmp_path, **how)


def test_an_unfinished_run_of_an_earlier_version_is_refused_in_a_sentence(tmp_path):
    class KilledError(Exception):
        pass

    def kill(line):
        if line["epoch"] == 2:
            raise KilledError

    how = dict(seeds=[0], protocol=Protocol(epochs=3))
    with pytest.raises(KilledError):
        train_run(ABOUT, DATA, "mlp", tmp_path, report=kill, save_every=0, **how)
    state = tmp_path / STATE_FILE
    with safe_open(state, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    about["fingerprint"] = about.pop("identity")
    save_file(load_file(state), state, metadata={"about": json.dumps(about)})
    with pytest.raises(RunError, match=r"begun by an older version.*remove it"):
        train_run(ABOUT, DATA, "mlp", tmp_path, **how)
