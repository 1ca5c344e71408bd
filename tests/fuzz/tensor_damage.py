"""Ways to damage the tensors of a file, in safetensors or in a state dict, and what is right."""

import io
import pickle
import struct
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch
from expected import Damage, Right
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

REFUSED, ANSWERED, EQUAL = Right.REFUSED, Right.ANSWERED, Right.EQUAL


def _with(w: Tensor, value: float) -> Tensor:
    w = w.clone() if w.is_floating_point() else w.double()
    w.view(-1)[-1] = value
    return w


CHANGES: dict[str, tuple[Callable[[Tensor], Any], Right]] = {
    "float8": (lambda w: w.to(torch.float8_e4m3fn), REFUSED),
    "float8 e5m2": (lambda w: w.to(torch.float8_e5m2), REFUSED),
    "int64": (lambda w: w.to(torch.int64), REFUSED),
    "uint8": (lambda w: w.to(torch.uint8), REFUSED),
    "bool": (lambda w: w.double() > 0, REFUSED),
    "complex": (lambda w: w.to(torch.complex64), REFUSED),
    "scalar": (lambda w: w.reshape(-1)[0].clone(), REFUSED),
    "empty": (lambda w: w.new_empty(0), REFUSED),
    "empty of its rank": (lambda w: w.new_empty([0] * w.ndim), REFUSED),
    "more axes": (lambda w: w[None].clone(), REFUSED),
    "fewer rows": (lambda w: w[:-1].clone(), REFUSED),
    "more rows": (lambda w: torch.cat([w, w[:1]]), REFUSED),
    "nan": (lambda w: _with(w, float("nan")), REFUSED),
    "inf": (lambda w: _with(w, float("inf")), REFUSED),
    "minus inf": (lambda w: _with(w, -float("inf")), REFUSED),
    "huge": (lambda w: _with(w, 1e38), ANSWERED),
    "float16": (lambda w: w.half(), ANSWERED),
    "bfloat16": (lambda w: w.bfloat16(), ANSWERED),
    "float64": (lambda w: w.double(), ANSWERED),
    "zeros": (torch.zeros_like, ANSWERED),
}
ONLY_PICKLED: dict[str, tuple[Callable[[Tensor], Any], Right]] = {
    "sparse": (lambda w: w.to_sparse(), REFUSED),
    "sparse csr": (lambda w: w.reshape(len(w), -1).to_sparse_csr(), REFUSED),
    "quantised": (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), REFUSED),
    "meta": (lambda w: w.to("meta"), REFUSED),
    "a number": (lambda w: 3.0, REFUSED),
    "a list": (lambda w: w.tolist(), REFUSED),
    "None": (lambda w: None, REFUSED),
    "expanded": (lambda w: torch.zeros(1).expand(10**6, 10**6), REFUSED),
    "a parameter": (lambda w: torch.nn.Parameter(w.clone()), EQUAL),
    "not contiguous": (lambda w: torch.stack([w, w], -1)[..., 0], EQUAL),
    "conjugate": (lambda w: torch.conj(torch.complex(w, w)), REFUSED),
    "negative view": (lambda w: torch.imag(torch.conj(torch.complex(w, w))), ANSWERED),
}


OF_A_NUMBER = ("float8", "int64", "bool", "complex", "nan", "inf", "more axes", "float64")
"""What can be done to a tensor without axes too."""
OWN_ROWS = ("root", "lm_head.weight")
"""Tensors that nothing else states the rows of: trees of an ensemble, classes of an output."""
OF_A_NAME = ("lacks", "renamed", "long name")
OF_SCALES = ("int64", "bool", "complex", "empty", "more axes", "fewer rows", "more rows", "nan",
             "inf", "minus inf")  # fmt: skip


def _change(chance: Random, changes: Iterable[str], w: Tensor) -> str:
    return chance.choice(sorted(OF_A_NUMBER if w.ndim == 0 else changes))


def pickled_tensor(chance: Random, path: Path) -> Damage:
    """One tensor of a state dict becomes another, or something else."""
    state = torch.load(path, weights_only=True)
    name = chance.choice(sorted(n for n in state if "pos_embedding" not in n))
    how = _change(chance, {**CHANGES, **ONLY_PICKLED}, state[name])
    change, right = {**CHANGES, **ONLY_PICKLED}[how]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state[name] = change(state[name])
        torch.save(state, path)
    return Damage(f"{path.name}: '{name}' {how}", right)


def pickled_whole(chance: Random, path: Path) -> Damage:
    """A state dict as a whole: keys gone, keys that are no text, other objects, code."""
    state = torch.load(path, weights_only=True)
    name = chance.choice(sorted(n for n in state if "pos_embedding" not in n))
    how = chance.choice(("lacks", "number", "list", "nested", "set", "code", "empty", "long"))
    if how == "lacks":
        del state[name]
    elif how == "number":
        state[3] = state.pop(name)
    elif how == "long":
        state["x" * 100_000] = state.pop(name)
    elif how == "nested":
        state[name] = {"weight": state[name]}
    elif how == "set":
        state[name] = {1, 2}
    whole: Any = {"list": list(state.values()), "empty": {}}.get(how, state)
    if how == "code":
        data = io.BytesIO()
        pickle.dump({name: _Trap(str(path.parent.parent / "ran"))}, data, protocol=2)
        path.write_bytes(data.getvalue())
    else:
        torch.save(whole, path)
    return Damage(f"{path.name}: {how} '{name}'", REFUSED)


def wrapped(chance: Random, path: Path) -> Damage:
    """The same state dict as data-parallel, compiled and Lightning modules save it."""
    state = torch.load(path, weights_only=True)
    prefixes = ("module.", "_orig_mod.", "model.", "net.")
    wrapper = "".join(chance.choices(prefixes, k=chance.randint(1, 3)))
    state = {f"{wrapper}{name}": w for name, w in state.items()}
    entries = ("state_dict", "model_state_dict", "model")
    for entry in chance.choices(entries, k=chance.randint(0, 3)):
        state = {"epoch": 3, "lr": [0.1], entry: state}
    torch.save(state, path)
    return Damage(f"{path.name}: wrapped in '{wrapper}'", EQUAL)


def quantised_name(chance: Random, path: Path) -> Damage:
    """A tensor beside the others that only quantised weights or an adapter have."""
    state = torch.load(path, weights_only=True)
    name = chance.choice(("qweight", "weight.absmax", "weight_scale_inv", "lora_A.weight"))
    state[f"x.{name}"] = torch.ones(2)
    torch.save(state, path)
    return Damage(f"{path.name}: with 'x.{name}'", REFUSED)


class _Trap:
    """Running this would leave a file outside."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


def stored_tensor(chance: Random, path: Path) -> Damage:
    """One tensor of a safetensors file becomes another, gets another name, or is gone."""
    return _stored(chance, path, ("",), (*CHANGES, *OF_A_NAME))


def scale(chance: Random, path: Path) -> Damage:
    """The scales of a quantised matrix do not fit it."""
    return _stored(chance, path, (".weight_scale",), (*OF_SCALES, *OF_A_NAME))


def zero_point(chance: Random, path: Path) -> Damage:
    """The codes of zero do not fit the quantised matrix."""
    changes = [how for how in OF_SCALES if how != "int64"]
    return _stored(chance, path, (".weight_zero_point",), changes)


def packed(chance: Random, path: Path) -> Damage:
    """Packed codes do not fit their scales."""
    parts = (".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_shape", ".weight_scale")
    changes = ("int64", "bool", "empty", "more axes", "fewer rows", "lacks")
    return _stored(chance, path, parts, changes)


def router(chance: Random, path: Path) -> Damage:
    """The router of a mixture has more or fewer rows than there are experts."""
    return _stored(chance, path, (".gate.",), ("fewer rows", "more rows"))


def _stored(chance: Random, path: Path, parts: tuple[str, ...], changes: Iterable[str]) -> Damage:
    """One of some changes to a tensor with one of ``parts`` in its name."""
    state, metadata = _load(path)
    name = chance.choice(sorted(name for name in state if any(part in name for part in parts)))
    how = _change(chance, changes, state[name])
    right = REFUSED
    if how in CHANGES:
        change, right = CHANGES[how]
        if name in OWN_ROWS and how.endswith("rows"):
            right = ANSWERED
        old, state[name] = state[name], change(state[name]).contiguous()
        if old.dtype == state[name].dtype and torch.equal(old.double(), state[name].double()):
            right = EQUAL  # whole numbers made whole numbers
    else:
        old = state.pop(name)
        if how == "renamed":
            state[name + ".x"] = old
        elif how == "long name":
            state["x" * 100_000] = old
    save_file(state, path, metadata)
    return Damage(f"{path.name}: '{name}' {how}", right)


def expert_gone(chance: Random, path: Path) -> Damage:
    """One expert is missing, in one block or in all."""
    state, metadata = _load(path)
    part = chance.choice(("", "layers.0.")), f".experts.{chance.randrange(3)}."
    kept = {name: w for name, w in state.items() if not all(p in name for p in part)}
    assert len(kept) < len(state)
    save_file(kept, path, metadata)
    return Damage(f"{path.name} lacks '{part[0]}…{part[1]}'", REFUSED)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def numbers_of_wrong_kind(chance: Random, path: Path) -> Damage:
    """One tensor has another shape or dtype; values of any kind may be meant."""
    state, metadata = _load(path)
    name = chance.choice(sorted(state))
    how = chance.choice(("float64", "bool", "more axes", "complex"))
    state[name] = CHANGES[how][0](state[name]).contiguous()
    save_file(state, path, metadata)
    return Damage(f"{path.name}: '{name}' {how}", REFUSED)


def header_claims(chance: Random, path: Path) -> Damage:
    """A safetensors file that is a header of claims and no tensors."""
    claims = chance.choice(
        (
            b'{"W": {"dtype": "F32", "shape": [10000000000], "data_offsets": [0, 40000000000]}}',
            b'{"W": {"dtype": "F32", "shape": [18446744073709551616], "data_offsets": [0, 0]}}',
            b'{"W": {"dtype": "F32", "shape": [0, 9223372036854775807], "data_offsets": [0, 0]}}',
            b'{"W": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
            b'{"W": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}',
            b'{"W": {"dtype": "BOOL", "shape": [0], "data_offsets": [0, 0]}}',
            b'{"__metadata__": {"transformer_nfn.space": "{}"}}',
            b'{"__metadata__": {"transformer_nfn.space": "[' + b"[" * 50_000 + b'"}}',
            b'{"__metadata__": 3}', b"{}", b"[]", b"null", b"{" * 100_000,
        )
    )  # fmt: skip
    path.write_bytes(struct.pack("<Q", len(claims)) + claims)
    return Damage(f"{path.name} claims {claims[:60]!r}", REFUSED)
