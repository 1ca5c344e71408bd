"""What the tests of symmetries share: which families, how far outputs may move, a row's action."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tiny_families import Network
from transformer_nfn.checkpoints.disguises import BLOCK_ROWS
from transformer_nfn.checkpoints.disguises.sites import Site, sites
from transformer_nfn.spaces.actions import Drawing

HOLDS, BREAKS = 1e-10, 1e-2
Weights = dict[str, Tensor]
Act = Callable[[Site, Mapping[str, Tensor], Drawing], Weights]

LEARNED = ("gpt2", "opt", "bert", "roberta", "distilbert", "vit", "deit")
ROTARY = ("llama", "mistral", "phi3", "qwen2", "gemma2")
PARTIAL = ("neox", "phi")
GROUPED = (*ROTARY, "qwen3")
T5 = ("t5", "t5-v1.1")
ALL = (*LEARNED, *GROUPED, *PARTIAL, *T5)
GATED = (*GROUPED, "t5-v1.1")
PRE_BIASED = ("gpt2", "opt", "vit", "deit", *PARTIAL)
POST = ("bert", "roberta", "distilbert")


def drawing(seed: int = 0) -> Drawing:
    return Drawing(torch.Generator().manual_seed(seed), condition=10.0)


def acted(net: Network, act: Act) -> Weights:
    """The network after a symmetry of each of its blocks."""
    out, how = dict(net.weights), drawing()
    for site in sites(net.about):
        own = {short: out[name] for short, name in site.names.items()}
        out |= {site.names[short]: w for short, w in act(site, own, how).items()}
    return out


def row(name: str) -> Act:
    return BLOCK_ROWS[name]
