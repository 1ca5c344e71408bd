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
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.kinds import Kinds, as_kinds
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunRecord

KEY = "identity"
# Records from before all weights counted name their digest otherwise.
OLDER_KEY = "fingerprint"


def training_identity(
    model: str,
    options: Mapping[str, Any],
    parts: Parts | Kinds,
    protocol: Protocol,
    seeds: list[int],
    damaged: Damaged | None = None,
) -> str:
    """Identifies a training: same model, protocol and seeds, and the same networks bit for bit.

    Every weight and every accuracy of all three parts counts, of every kind and of those left
    out; where they lie and how their tensors are ordered does not.
    """
    digest = hashlib.sha256(_settings(model, options, protocol, seeds))
    kinds = as_kinds(parts)
    more = kinds.more or [None] * len(kinds.names)
    whole: list[Dataset | None] = []
    for of_a_kind in zip(kinds.train, kinds.val, kinds.test, more, strict=True):
        whole += of_a_kind
    whole += kinds.left_out.values()
    whole += [] if damaged is None else [damaged.train, damaged.val]
    for part in whole:
        if part is None:
            continue
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
    parts: Parts | Kinds,
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
    kinds = as_kinds(parts)
    for part in (*kinds.train, *kinds.val, *kinds.test):
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
