"""Which Φ of the paper is which block of a layer? Used to move parameters between the two."""

import torch
from paper_transcription import PaperModel
from torch import Tensor

from transformer_nfn.models import BlockEncoder, TransformerNFN
from transformer_nfn.nn import Equivariant, Invariant

# (source, target, level) -> name in `paper_transcription.PHI_E`.
NAMES = {
    ("W_Q", "W_Q", "head"): "Q:Q",
    ("W_K", "W_K", "head"): "K:K",
    ("W_V", "W_V", "head"): "V:V",
    ("W_O", "W_O", "head"): "O:O1",
    ("W_O", "W_O", "head feature"): "O:O2",
    ("W_Q·W_K", "W_A", ""): "A:QK",
    ("W_V·W_O", "W_A", ""): "A:VO1",
    ("W_V·W_O", "W_A", "feature"): "A:VO2",
    ("W_A", "W_A", ""): "A:A1",
    ("W_A", "W_A", "feature"): "A:A2",
    ("W_A", "W_A", "neuron"): "A:A3",
    ("W_A", "W_A", "feature neuron"): "A:A4",
    ("W_B", "W_A", ""): "A:B1",
    ("W_B", "W_A", "neuron"): "A:B2",
    ("b_A", "W_A", ""): "A:bA1",
    ("b_A", "W_A", "neuron"): "A:bA2",
    ("b_B", "W_A", ""): "A:bB",
    ("W_Q·W_K", "b_A", ""): "bA:QK",
    ("W_V·W_O", "b_A", ""): "bA:VO",
    ("W_A", "b_A", ""): "bA:A1",
    ("W_A", "b_A", "neuron"): "bA:A2",
    ("W_B", "b_A", ""): "bA:B1",
    ("W_B", "b_A", "neuron"): "bA:B2",
    ("b_A", "b_A", ""): "bA:bA1",
    ("b_A", "b_A", "neuron"): "bA:bA2",
    ("b_B", "b_A", ""): "bA:bB",
    ("W_Q·W_K", "W_B", ""): "B:QK",
    ("W_V·W_O", "W_B", ""): "B:VO",
    ("W_A", "W_B", ""): "B:A1",
    ("W_A", "W_B", "neuron"): "B:A2",
    ("W_B", "W_B", ""): "B:B1",
    ("W_B", "W_B", "neuron"): "B:B2",
    ("b_A", "W_B", ""): "B:bA1",
    ("b_A", "W_B", "neuron"): "B:bA2",
    ("b_B", "W_B", ""): "B:bB",
    ("W_Q·W_K", "b_B", ""): "bB:QK",
    ("W_V·W_O", "b_B", ""): "bB:VO",
    ("W_A", "b_B", ""): "bB:A",
    ("W_B", "b_B", ""): "bB:B",
    ("b_A", "b_B", ""): "bB:bA",
    ("b_B", "b_B", ""): "bB:bB",
}
SHORT = {"W_Q·W_K": "QK", "W_V·W_O": "VO", "W_A": "A", "W_B": "B", "b_A": "bA", "b_B": "bB"}


def phi_of_equivariant(layer: Equivariant, group: int = 0) -> dict[str, Tensor]:
    """The parameters of one group as the paper's Φ, each ``[e, d, …]`` (constants ``[e, …]``)."""
    out: dict[str, Tensor] = {}
    for block in layer.blocks():
        name = NAMES[block.term.name, block.target.name, " ".join(block.level)]
        assert name not in out
        # Blocks are [e, out free, d, in free], the paper writes [e, d, out free, in free].
        weight = block.weight[group] if layer.groups > 1 else block.weight
        weight = weight.movedim(1 + len(block.target.free), 1)
        out[name] = (weight * block.scale).detach()
    top = layer.level_maps[-1]
    assert top.bias is not None
    bias = top.bias[group] if layer.groups > 1 else top.bias
    for target, start, width in top.offsets():
        constant = bias[start : start + width].detach()
        if target.free:
            constant = constant.view(layer.out_channels // layer.groups, -1)
        out[f"{SHORT[target.name]}:1"] = constant
    return out


def phi_of_invariant(layer: Invariant, group: int = 0) -> dict[str, Tensor]:
    """The parameters of one group as the paper's Φ with e = 1, each ``[1, d, …, D']``."""
    out = {}
    for block in layer.blocks():
        weight = block.weight[group] if layer.groups > 1 else block.weight
        out[SHORT[block.term.name]] = (weight * block.scale).detach().movedim(0, -1)[None]
    assert layer.map.bias is not None
    bias = layer.map.bias[group] if layer.groups > 1 else layer.map.bias
    return out | {"1": bias.detach()[None]}


def copy_into_paper(model: TransformerNFN, paper: PaperModel) -> None:
    """Gives the literal model the parameters of the other one."""
    (encoder,) = model.encoders
    assert isinstance(encoder, BlockEncoder)
    with torch.no_grad():
        for i, (layers, last) in enumerate(zip(paper.equivariant, paper.invariant, strict=True)):
            for mine, other in zip(encoder.equivariant, layers, strict=True):  # type: ignore[arg-type]
                assert isinstance(mine, Equivariant)
                for name, phi in phi_of_equivariant(mine, i).items():
                    other.phi[name].copy_(phi)
            for name, phi in phi_of_invariant(encoder.invariant, i).items():
                last[0].phi[name].copy_(phi)  # type: ignore[index]
            last[1].load_state_dict(encoder.norms[i].state_dict())  # type: ignore[index]
    paper.mlp.load_state_dict(model.neck.state_dict())
    assert model.classifier is not None
    paper.classifier.load_state_dict(model.classifier.state_dict())
    paper.head.load_state_dict(model.head.state_dict())
