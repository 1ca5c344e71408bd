"""Which tensors must be at hand together? Those of a block with the norm that it reads.

A symmetry touches few tensors; a *site* has all of one block under short names, so that a network
can be disguised block by block. In post-norm networks the norm that a block reads stands in the
block before it (or after the embedding); here it goes with its readers, as ``norm_0``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformer_nfn.functional.description import KEPT, Block, Stack, Transformer


@dataclass(frozen=True)
class Site:
    """One block of a network, and where its tensors stand.

    Attributes:
        about: the network.
        stack: the stack it belongs to.
        index: its place there.
        names: canonical names by the names used at the site.
    """

    about: Transformer
    stack: Stack
    index: int
    names: Mapping[str, str]

    @property
    def block(self) -> Block:
        """Its description."""
        return self.stack.blocks[self.index]


def sites(about: Transformer) -> Iterator[Site]:
    """All blocks of a network, in order."""
    for stack in about.stacks:
        for i, block in enumerate(stack.blocks):
            prefix = f"{stack.prefix}{i}."
            names = {n.removeprefix(prefix): n for n in about.tensors if n.startswith(prefix)}
            if block.order == "post":
                names = {k: n for k, n in names.items() if not k.startswith("norm_2.")}
                before = f"{stack.prefix}{i - 1}.norm_2" if i else "embed_norm"
                names |= _norm("norm_0", before, about)
            yield Site(about, stack, i, names)


def end_names(about: Transformer) -> dict[str, str]:
    """Names of all tensors at no block's site: embeddings, last norm (as ``norm``), heads."""
    taken = {name for site in sites(about) for name in site.names.values()}
    out = {}
    last = about.stacks[-1]
    final = "norm" if last.final_norm else f"{len(last.blocks) - 1}.norm_2"
    final = f"{last.prefix}{final}."
    for name in about.tensors:
        if name not in taken and not name.startswith(KEPT):
            short = f"norm.{name.removeprefix(final)}" if name.startswith(final) else name
            out[short] = name
    return out


def _norm(short: str, name: str, about: Transformer) -> dict[str, str]:
    return {f"{short}.{p}": f"{name}.{p}" for p in "gb" if f"{name}.{p}" in about.tensors}
