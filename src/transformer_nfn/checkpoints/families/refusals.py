"""Refuse mixtures of experts by their config and the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformer_nfn.io.checkpoint import check_plain, refuse

EXPERT = re.compile(r"\.(experts|block_sparse_moe|shared_expert|shared_experts|router)\.")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_contents(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Refuse what the config or the names of the tensors show to be of a kind that is not read.

    Raises:
        CheckpointError: for quantised weights, adapters and mixtures of experts.
    """
    names = list(keys)
    check_plain(names, config, where)
    for key in names:
        if EXPERT.search(key):
            refuse(f"{where}': '{key}", "a mixture of experts")
    for field in EXPERTS:
        experts = config.get(field)
        if type(experts) is int and 1 < experts < 1 << 30:
            refuse(f"{where}': '{field} = {experts}", "a mixture of experts")
