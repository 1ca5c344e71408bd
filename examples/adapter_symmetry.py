"""A symmetry of your own: the inner basis of an adapter, ``W_A + A B``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from transformer_nfn.checkpoints.symmetries import SYMMETRIES, Site, Symmetry
from transformer_nfn.checkpoints.symmetries.base import Noise, Tensors, Weights, block_parts
from transformer_nfn.functional.description import Transformer
from transformer_nfn.spaces.actions import Drawing, Linear, Size
from transformer_nfn.spaces.actions.solvers import nearest_matrix
from transformer_nfn.testing import write_example_checkpoint


# --8<-- [start:class]
class AdapterBasis(Symmetry[Tensor]):
    """``A → A G`` and ``B → G⁻¹ B`` with any invertible ``G [r, r]``."""

    name = "adapters re-based"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every block with an adapter."""
        for part in block_parts(model):
            if "W_A.A" in part.names:
                tensors = {"W": "W_A", "A": "W_A.A", "B": "W_A.B"}
                yield Site(model, {own: part.names[name] for own, name in tensors.items()})

    def size(self, site: Site) -> Size:
        """GL(r)."""
        return Linear().size(site.shape("A")[1])

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A matrix of condition ``how.condition``."""
        return Linear().draw(site.shape("A")[1], (), how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies both factors."""
        A, B = weights["A"], weights["B"]
        return {"A": A @ g.to(A), "B": torch.linalg.inv(g.double()).to(B) @ B}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """The matrix that takes both factors nearest to those of ``b``."""
        plain, dual = ((a[n][None], b[n][None]) for n in "AB")
        return nearest_matrix(plain, (dual[0].mT, dual[1].mT))[0]

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """The adapter merged: the sum is all that the network depends on."""
        W, A, B = (weights[name] for name in "WAB")
        return {"W": W + A @ B, "A": torch.zeros_like(A), "B": torch.zeros_like(B)}


# --8<-- [end:class]
# --8<-- [start:use]
def main(folder: str) -> None:
    """Run every driver on a small Llama with adapters and on a disguise of it."""
    from transformer_nfn.checkpoints import (
        OpenOptions,
        align,
        disguise,
        inspect,
        open_model,
        relate,
    )
    from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint

    SYMMETRIES.append(AdapterBasis())
    family = OpenOptions(architecture=Path(__file__).with_name("llama_adapter.toml"))
    with open_model(write_adapters(f"{folder}/a"), family) as A:
        acted = disguise(A, f"{folder}/b", torch.Generator().manual_seed(0)).acted
        print("disguise:", acted["adapters re-based"], "adapters")
        size = {row.name: row.continuous for row in inspect(A).symmetries}
        print("inspect:", size["adapters re-based"], "parameters")
        with open_model(f"{folder}/b", family) as B:
            print("compare:", relate(A, B, prove=False).verdict)
            print("compare --prove:", relate(A, B, prove=True).verdict)
            both = take_fingerprint(A), take_fingerprint(B)
            print("fingerprint:", compare_fingerprints(*both).summary())
            aligned = align(B, A, f"{folder}/aligned")
            print(f"align: {aligned.before:.1g} before, {aligned.after:.0e} after")


# --8<-- [end:use]
def write_adapters(folder: str) -> Path:
    """A small Llama with an adapter of rank 2 in each block."""
    file = write_example_checkpoint(folder) / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for i in range(2):
        for name, shape in (("low_rank_A", (2, 8)), ("low_rank_B", (16, 2))):
            key = f"model.layers.{i}.mlp.up_proj.{name}.weight"
            tensors[key] = torch.randn(shape, generator=generator)
    save_file(tensors, file)
    return file.parent


if __name__ == "__main__":
    main(sys.argv[1])
