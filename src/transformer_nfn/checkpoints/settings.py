"""Settings of two models that differ, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from transformer_nfn.functional.description import Transformer


def differing_settings(a: Transformer, b: Transformer) -> Iterator[str]:
    """Yield a sentence for each setting that differs, of blocks for the first that does.

    Poolers, MLM transforms and ties are left out: tensors that only one model has show them.
    """
    left_out = ("family", "tensors", "pooler", "mlm", "tied", "headless", "stacks")
    for name in (f.name for f in fields(a) if f.name not in left_out):
        x, y = getattr(a, name), getattr(b, name)
        if x != y:
            yield f"{name} is {x} in A and {y} in B"
    for s, t in zip(a.stacks, b.stacks, strict=True):
        for i, (x, y) in enumerate(zip(s.blocks, t.blocks, strict=True)):
            if x == y:
                continue
            for part in ("attention", "mlp", "cross"):
                p, q = getattr(x, part), getattr(y, part)
                for name in (f.name for f in fields(p or q)) if p != q else ():
                    u, v = getattr(p, name, None), getattr(q, name, None)
                    if u != v:
                        yield f"{name} of block {s.prefix}{i} is {u} in A and {v} in B"
            if replace(x, attention=y.attention, mlp=y.mlp, cross=y.cross) != y:
                yield f"order of block {s.prefix}{i} is {x.order} in A and {y.order} in B"
            return  # the other blocks differ likewise
