"""What does a killed training need to go on as if nothing had happened? One file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.io.json_fields import parse_object
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.prediction.records import RunError

STATE_FILE = "training.safetensors"


def write_state(
    path: Path,
    identity: str,
    state: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    about: Mapping[str, Any],
) -> None:
    """Writes a whole training, beside first and then renamed.

    Args:
        path: where.
        identity: of the training, see `identity.training_identity`.
        state: its parameters by name.
        best: those of the best epoch so far.
        optimiser: its Adam.
        about: where it stands, as JSON values.
    """
    tensors = {f"state.{k}": v.detach() for k, v in state.items()}
    tensors |= {f"best.{k}": v for k, v in best.items()}
    for i, entry in optimiser.state_dict()["state"].items():
        tensors |= {f"adam.{i}.{k}": v for k, v in entry.items()}
    write_tensors(path, tensors, {"about": json.dumps({**about, "identity": identity})})


def read_state(
    path: Path,
    identity: str,
    state: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Takes up what `write_state` wrote, in place; refuses the state of another training.

    The optimiser has tensors of its own afterwards. Returns ``about``.
    """
    tensors, metadata = read_tensors(path)
    about = parse_object(metadata.get("about", "{}"), str(path), RunError)
    if "identity" not in about:
        raise RunError(
            f"'{path}' was begun by an older version, which did not tell trainings apart "
            "by all their weights; choose another --out or remove it"
        )
    if about["identity"] != identity:
        raise RunError(
            f"'{path}' is of another training (other networks, model or protocol); "
            "choose another --out or remove it"
        )
    if any(f"state.{name}" not in tensors for name in state):
        raise RunError(
            f"'{path}' lays out its parameters otherwise (one seed begun on another kind of "
            "device?); choose another --out or remove it"
        )
    with torch.no_grad():
        for name, value in state.items():
            for part, target in (("state", value), ("best", best[name])):
                stored = tensors[f"{part}.{name}"]
                if stored.shape != target.shape or stored.dtype != target.dtype:
                    raise RunError(f"'{path}' is damaged: '{part}.{name}' is not as it was")
                target.copy_(stored)
    whole = optimiser.state_dict()
    whole["state"] = _adam_entries(path, tensors, optimiser)
    optimiser.load_state_dict(whole)
    return about


def _adam_entries(
    path: Path, tensors: Mapping[str, Tensor], optimiser: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    entries: dict[int, dict[str, Tensor]] = {}
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for key, value in tensors.items():
        if key.startswith("adam."):
            _, index, name = key.split(".", 2)
            like = torch.zeros(()) if name == "step" else parameters[int(index)]
            if value.shape != like.shape or value.dtype != like.dtype:
                raise RunError(f"'{path}' is damaged: '{key}' is not as it was saved")
            entries.setdefault(int(index), {})[name] = value
    return entries
