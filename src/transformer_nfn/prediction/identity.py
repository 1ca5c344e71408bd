"""Which training is this? A digest of everything that its result follows from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.models import tensors_of
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Parts
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunRecord

KEY = "identity"
# Records from before all weights counted name their digest otherwise.
OLDER_KEY = "fingerprint"


def training_identity(
    model: str,
    options: Mapping[str, Any],
    parts: Parts,
    protocol: Protocol,
    seeds: list[int],
    damaged: Damaged | None = None,
) -> str:
    """Identifies a training: same model, protocol and seeds, and the same networks bit for bit.

    Every weight and every accuracy of all three parts counts; where they lie and how their
    tensors are ordered does not.
    """
    digest = hashlib.sha256(_settings(model, options, protocol, seeds))
    more = [] if parts.more is None else [parts.more]
    more += [] if damaged is None else [damaged.train, damaged.val]
    for part in (parts.train, parts.val, parts.test, *more):
        tensors = tensors_of(part.network) | {"accuracy": part.accuracy}
        for name in sorted(tensors):
            w = tensors[name]
            digest.update(f"{name} {w.dtype} {list(w.shape)}".encode())
            digest.update(_bytes(w))
    return digest.hexdigest()[:16]


def is_of(
    record: RunRecord,
    identity: str,
    model: str,
    options: Mapping[str, Any],
    parts: Parts,
    protocol: Protocol,
    seeds: list[int],
) -> bool:
    """Whether a finished run is of this training.

    Runs from before all weights counted are told by what they recorded: model, protocol, seeds,
    the accuracy of every network, and ``W_Q`` of its first block.
    """
    if KEY in record.protocol or OLDER_KEY not in record.protocol:
        return record.protocol.get(KEY) == identity
    digest = hashlib.sha256(_settings(model, options, protocol, seeds))
    for part in (parts.train, parts.val, parts.test):
        digest.update(_bytes(part.accuracy))
        digest.update(_bytes(part.network["blocks"][0]["W_Q"]))
    return bool(record.protocol[OLDER_KEY] == digest.hexdigest()[:16])


def _settings(
    model: str, options: Mapping[str, Any], protocol: Protocol, seeds: list[int]
) -> bytes:
    about = {
        "model": model,
        "options": dict(options),
        "protocol": protocol.to_json(),
        "seeds": seeds,
    }
    return json.dumps(about, sort_keys=True).encode()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
