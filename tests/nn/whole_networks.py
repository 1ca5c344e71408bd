"""Whole networks of any size, and what leaves their functions as they are, one at a time."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_nfn.models import Batch

Net = dict[str, Any]
"""Blocks ``[n, 1, …]`` in a list, classifier and embedding ``[n, …]`` as dicts or one tensor."""


class Moved(NamedTuple):
    """A network in disguise, and its positions."""

    network: Net
    positions: Tensor


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole_network(
    n: int = 3, *, D: int = 6, heads: int = 2, d: int = 3, F: int = 5, depth: int = 2,
    hidden: int = 4, classes: int = 3, patch: int = 4, seed: int = 0, v: int | None = None,
) -> Net:  # fmt: skip
    """Weights ``[n, 1, …]`` of blocks, ``[n, …]`` of embedding (none if patch is 0), classifier."""
    v = d + 1 if v is None else v
    sizes = {
        "W_Q": (heads, D, d), "W_K": (heads, D, d), "W_V": (heads, D, v),
        "W_O": (heads, v, D), "W_A": (D, F), "b_A": (F,), "W_B": (F, D), "b_B": (D,),
    }  # fmt: skip
    ends = {"W_1": (D, hidden), "b_1": (hidden,), "W_2": (hidden, classes), "b_2": (classes,)}
    seeds = iter(range(1000 * seed, 1000 * (seed + 1)))
    network: Net = {
        "blocks": [
            {name: draw(n, 1, *shape, seed=next(seeds)) for name, shape in sizes.items()}
            for _ in range(depth)
        ],
        "classifier": {name: draw(n, *shape, seed=next(seeds)) for name, shape in ends.items()},
    }
    if patch:
        network["embedding"] = {
            "W": draw(n, patch, D, seed=next(seeds)), "b": draw(n, D, seed=next(seeds))
        }  # fmt: skip
    return network


def batch_of(net: Net) -> Batch:
    """The network as predictors read it, tensors by their full names."""
    tensors = {
        f"blocks.{i}.{name}": w[:, 0]
        for i, block in enumerate(net.get("blocks", ()))
        for name, w in block.items()
    }
    for part in ("embedding", "classifier"):
        value = net.get(part, {})
        named = {"W": value} if isinstance(value, Tensor) else value
        tensors |= {f"{part}.{name}": w for name, w in named.items()}
    return Batch.of(tensors)


def shuffles(rows: int, size: int, seed: int = 7) -> Tensor:
    """A permutation in each row, none the identity (for more than one unit)."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randperm(size, generator=generator) for _ in range(rows)]
    return torch.stack([p.roll(1) if bool((p == torch.arange(size)).all()) else p for p in found])


def permute_heads(net: Net, positions: Tensor) -> Moved:
    index = shuffles(len(net["blocks"]), net["blocks"][0]["W_Q"].shape[2])
    for block, p in zip(net["blocks"], index, strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            block[name] = block[name][:, :, p]
    return Moved(net, positions)


def change_head_bases(net: Net, positions: Tensor) -> Moved:
    for i, block in enumerate(net["blocks"]):
        h, _, d = block["W_Q"].shape[2:]
        v = block["W_V"].shape[-1]
        M, N = draw(h, d, d, seed=i) + torch.eye(d) * 2, draw(h, v, v, seed=9 + i) + torch.eye(v)
        block["W_Q"] = block["W_Q"] @ M
        block["W_K"] = block["W_K"] @ torch.linalg.inv(M).mT
        block["W_V"] = block["W_V"] @ N
        block["W_O"] = torch.linalg.inv(N) @ block["W_O"]
    return Moved(net, positions)


def permute_first_stream(net: Net, positions: Tensor) -> Moved:
    p = shuffles(1, positions.shape[-1])[0]
    if "embedding" in net:
        net["embedding"] = {name: w[..., p] for name, w in net["embedding"].items()}
    for name in ("W_Q", "W_K", "W_V"):
        net["blocks"][0][name] = net["blocks"][0][name][..., p, :]
    return Moved(net, positions[..., p])


def permute_later_streams(net: Net, positions: Tensor) -> Moved:
    """Those between two blocks, and the last, which the classifier reads."""
    blocks = net["blocks"]
    index = shuffles(len(blocks), positions.shape[-1])
    for i, p in enumerate(index):
        blocks[i] |= {name: blocks[i][name][..., p] for name in ("W_B", "b_B")}
        if i + 1 < len(blocks):
            for name in ("W_Q", "W_K", "W_V"):
                blocks[i + 1][name] = blocks[i + 1][name][..., p, :]
    net["classifier"]["W_1"] = net["classifier"]["W_1"][:, index[-1]]
    return Moved(net, positions)


def permute_middle_streams(net: Net, positions: Tensor) -> Moved:
    """Those between attention and MLP."""
    index = shuffles(len(net["blocks"]), positions.shape[-1], seed=8)
    for block, p in zip(net["blocks"], index, strict=True):
        block["W_O"] = block["W_O"][..., p]
        block["W_A"] = block["W_A"][..., p, :]
    return Moved(net, positions)


def permute_neurons(net: Net, positions: Tensor) -> Moved:
    index = shuffles(len(net["blocks"]), net["blocks"][0]["b_A"].shape[-1])
    for block, p in zip(net["blocks"], index, strict=True):
        block |= {"W_A": block["W_A"][..., p], "b_A": block["b_A"][..., p]}
        block["W_B"] = block["W_B"][..., p, :]
    return Moved(net, positions)


def permute_hidden_units(net: Net, positions: Tensor) -> Moved:
    ends = net["classifier"]
    p = shuffles(1, ends["b_1"].shape[-1])[0]
    ends |= {"W_1": ends["W_1"][..., p], "b_1": ends["b_1"][..., p], "W_2": ends["W_2"][:, p]}
    return Moved(net, positions)


def scale_neurons(net: Net, positions: Tensor) -> Moved:
    for i, block in enumerate(net["blocks"]):
        s = draw(block["b_A"].shape[-1], seed=i).exp()
        block |= {"W_A": block["W_A"] * s, "b_A": block["b_A"] * s}
        block["W_B"] = block["W_B"] / s[:, None]
    ends = net["classifier"]
    s = draw(ends["b_1"].shape[-1], seed=99).exp()
    ends |= {"W_1": ends["W_1"] * s, "b_1": ends["b_1"] * s, "W_2": ends["W_2"] / s[:, None]}
    return Moved(net, positions)


def scale_what_norms_read(net: Net, positions: Tensor) -> Moved:
    for i, block in enumerate(net["blocks"]):
        block["W_O"] = block["W_O"] * (2.0 + i)
        block |= {"W_B": block["W_B"] * (0.1 + i), "b_B": block["b_B"] * (0.1 + i)}
    return Moved(net, positions)


def shift_what_norms_read(net: Net, positions: Tensor) -> Moved:
    """The same number at every unit of a stream that goes into a LayerNorm."""
    for i, block in enumerate(net["blocks"]):
        block["W_O"] = block["W_O"] + draw(*block["W_O"].shape[:-1], 1, seed=i)
        for name in ("W_B", "b_B"):
            block[name] = block[name] + draw(*block[name].shape[:-1], 1, seed=50 + i)
    if "embedding" in net:
        for name, w in net["embedding"].items():
            net["embedding"][name] = w + draw(*w.shape[:-1], 1, seed=80)
    return Moved(net, positions + draw(*positions.shape[:-1], 1, seed=81))


def shift_what_reads_norms(net: Net, positions: Tensor) -> Moved:
    """The same weight from every unit of a stream that comes out of a LayerNorm."""
    for i, block in enumerate(net["blocks"]):
        for j, name in enumerate(("W_Q", "W_K", "W_V", "W_A")):
            w = block[name]
            block[name] = w + draw(*w.shape[:-2], 1, w.shape[-1], seed=10 * i + j)
    ends = net["classifier"]
    ends["W_1"] = ends["W_1"] + draw(len(ends["W_1"]), 1, ends["W_1"].shape[-1], seed=60)
    return Moved(net, positions)


MOVES: tuple[Callable[[Net, Tensor], Moved], ...] = (
    permute_heads, change_head_bases, permute_first_stream, permute_later_streams,
    permute_middle_streams, permute_neurons, permute_hidden_units, scale_neurons,
    scale_what_norms_read, shift_what_norms_read, shift_what_reads_norms,
)  # fmt: skip


def move(how: Callable[[Net, Tensor], Moved], net: Net, positions: Tensor) -> Moved:
    """A network in one disguise; the one given stays as it is."""
    return how(deepcopy(net), positions.clone())


def move_all(net: Net, positions: Tensor) -> Moved:
    """In all disguises, one after the other."""
    for how in MOVES:
        net, positions = move(how, net, positions)
    return Moved(net, positions)
