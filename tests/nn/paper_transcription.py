"""What do the paper's formulas say, line by line? The oracle for the layers, kept literal.

Every line below is one line of the pseudocode of the appendix "Implementation of Equivariant and
Invariant Layers", with the einsum as printed; per-head products [WW]^(QK,s), [WW]^(VO,s) of shape
``[b, d, h, D, D]`` included. Only two things differ from print, and both are misprints: the
constant of E(W)^(B) is unsqueezed at -2 too, and the products are written out.
"""

import torch
from torch import Tensor, nn

einsum = torch.einsum

# name -> axes of the parameter; e, d are channels, D the width, o the outputs of I.
PHI_E = {
    "Q:Q": "edDD",
    "K:K": "edDD",
    "V:V": "edDD",
    "O:O1": "ed",
    "O:O2": "ed",
    "A:QK": "edDD",
    "A:VO1": "edD",
    "A:VO2": "edD",
    "A:A1": "ed",
    "A:A2": "ed",
    "A:A3": "ed",
    "A:A4": "ed",
    "A:B1": "edD",
    "A:B2": "edD",
    "A:bA1": "ed",
    "A:bA2": "ed",
    "A:bB": "edD",
    "A:1": "e",
    "bA:QK": "edDD",
    "bA:VO": "edD",
    "bA:A1": "ed",
    "bA:A2": "ed",
    "bA:B1": "edD",
    "bA:B2": "edD",
    "bA:bA1": "ed",
    "bA:bA2": "ed",
    "bA:bB": "edD",
    "bA:1": "e",
    "B:QK": "edDDD",
    "B:VO": "edDD",
    "B:A1": "edD",
    "B:A2": "edD",
    "B:B1": "edDD",
    "B:B2": "edDD",
    "B:bA1": "edD",
    "B:bA2": "edD",
    "B:bB": "edDD",
    "B:1": "eD",
    "bB:QK": "edDDD",
    "bB:VO": "edDD",
    "bB:A": "edD",
    "bB:B": "edDD",
    "bB:bA": "edD",
    "bB:bB": "edDD",
    "bB:1": "eD",
}
PHI_I = {
    "QK": "edDDo",
    "VO": "edDo",
    "A": "edo",
    "B": "edDo",
    "bA": "edo",
    "bB": "edDo",
    "1": "eo",
}


def products(w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[WW]^(QK,s) and [WW]^(VO,s) of every head (eq. 17)."""
    QK = w["W_Q"] @ w["W_K"].transpose(-1, -2)
    VO = w["W_V"] @ w["W_O"]
    return QK, VO


def equivariant(phi: dict[str, Tensor], w: dict[str, Tensor]) -> dict[str, Tensor]:
    """E(U) of Theorem "equivariant layer", bullet notation."""
    QK, VO = products(w)
    A, B, bA, bB = w["W_A"], w["W_B"], w["b_A"], w["b_B"]
    return {
        "W_Q": einsum("bdhpk,edjp->behjk", w["W_Q"], phi["Q:Q"]),
        "W_K": einsum("bdhpk,edjp->behjk", w["W_K"], phi["K:K"]),
        "W_V": einsum("bdhpk,edjp->behjk", w["W_V"], phi["V:V"]),
        "W_O": einsum("bdhjk,ed->behj", w["W_O"], phi["O:O1"]).unsqueeze(-1)
        + einsum("bdhjk,ed->behjk", w["W_O"], phi["O:O2"]),
        "W_A": einsum("bdhpq,edpq->be", QK, phi["A:QK"]).unsqueeze(-1).unsqueeze(-1)
        + einsum("bdhpq,edp->be", VO, phi["A:VO1"]).unsqueeze(-1).unsqueeze(-1)
        + einsum("bdhpj,edp->bej", VO, phi["A:VO2"]).unsqueeze(-1)
        + einsum("bdpq,ed->be", A, phi["A:A1"]).unsqueeze(-1).unsqueeze(-1)
        + einsum("bdjq,ed->bej", A, phi["A:A2"]).unsqueeze(-1)
        + einsum("bdpk,ed->bek", A, phi["A:A3"]).unsqueeze(-2)
        + einsum("bdjk,ed->bejk", A, phi["A:A4"])
        + einsum("bdpq,edq->be", B, phi["A:B1"]).unsqueeze(-1).unsqueeze(-1)
        + einsum("bdkq,edq->bek", B, phi["A:B2"]).unsqueeze(-2)
        + einsum("bdq,ed->be", bA, phi["A:bA1"]).unsqueeze(-1).unsqueeze(-1)
        + einsum("bdk,ed->bek", bA, phi["A:bA2"]).unsqueeze(-2)
        + einsum("bdq,edq->be", bB, phi["A:bB"]).unsqueeze(-1).unsqueeze(-1)
        + einsum("e->e", phi["A:1"]).unsqueeze(0).unsqueeze(-1).unsqueeze(-1),
        "W_B": einsum("bdhpq,edkpq->bek", QK, phi["B:QK"]).unsqueeze(-2)
        + einsum("bdhpq,edkp->bek", VO, phi["B:VO"]).unsqueeze(-2)
        + einsum("bdpq,edk->bek", A, phi["B:A1"]).unsqueeze(-2)
        + einsum("bdpj,edk->bejk", A, phi["B:A2"])
        + einsum("bdpq,edkq->bek", B, phi["B:B1"]).unsqueeze(-2)
        + einsum("bdjq,edkq->bejk", B, phi["B:B2"])
        + einsum("bdq,edk->bek", bA, phi["B:bA1"]).unsqueeze(-2)
        + einsum("bdj,edk->bejk", bA, phi["B:bA2"])
        + einsum("bdq,edkq->bek", bB, phi["B:bB"]).unsqueeze(-2)
        + einsum("ek->ek", phi["B:1"]).unsqueeze(0).unsqueeze(-2),
        "b_A": einsum("bdhpq,edpq->be", QK, phi["bA:QK"]).unsqueeze(-1)
        + einsum("bdhpq,edp->be", VO, phi["bA:VO"]).unsqueeze(-1)
        + einsum("bdpq,ed->be", A, phi["bA:A1"]).unsqueeze(-1)
        + einsum("bdpk,ed->bek", A, phi["bA:A2"])
        + einsum("bdpq,edq->be", B, phi["bA:B1"]).unsqueeze(-1)
        + einsum("bdkq,edq->bek", B, phi["bA:B2"])
        + einsum("bdq,ed->be", bA, phi["bA:bA1"]).unsqueeze(-1)
        + einsum("bdk,ed->bek", bA, phi["bA:bA2"])
        + einsum("bdq,edq->be", bB, phi["bA:bB"]).unsqueeze(-1)
        + einsum("e->e", phi["bA:1"]).unsqueeze(0).unsqueeze(-1),
        "b_B": einsum("bdhpq,edkpq->bek", QK, phi["bB:QK"])
        + einsum("bdhpq,edkp->bek", VO, phi["bB:VO"])
        + einsum("bdpq,edk->bek", A, phi["bB:A"])
        + einsum("bdpq,edkq->bek", B, phi["bB:B"])
        + einsum("bdq,edk->bek", bA, phi["bB:bA"])
        + einsum("bdq,edkq->bek", bB, phi["bB:bB"])
        + einsum("ek->ek", phi["bB:1"]).unsqueeze(0),
    }


def invariant(phi: dict[str, Tensor], w: dict[str, Tensor]) -> Tensor:
    """I(U) of eq. 18 and Theorem "invariant layer": ``[b, e, D']``."""
    QK, VO = products(w)
    return (
        einsum("bdhpq,edpqk->bek", QK, phi["QK"])
        + einsum("bdhpq,edpk->bek", VO, phi["VO"])
        + einsum("bdpq,edk->bek", w["W_A"], phi["A"])
        + einsum("bdpq,edqk->bek", w["W_B"], phi["B"])
        + einsum("bdq,edk->bek", w["b_A"], phi["bA"])
        + einsum("bdq,edqk->bek", w["b_B"], phi["bB"])
        + einsum("ek->ek", phi["1"]).unsqueeze(0)
    )


def shape(axes: str, *, d: int, e: int, D: int, out: int = 1) -> tuple[int, ...]:
    """The sizes of a parameter written as in `PHI_E` and `PHI_I`."""
    return tuple({"e": e, "d": d, "D": D, "o": out}[a] for a in axes)


class PaperEquivariant(nn.Module):
    """E with its Φ as parameters, initialised Xavier normal."""

    def __init__(self, d: int, e: int, D: int) -> None:
        super().__init__()
        self.phi = nn.ParameterDict({n: _init(a, d, e, D) for n, a in PHI_E.items()})

    def forward(self, w: dict[str, Tensor]) -> dict[str, Tensor]:
        return equivariant(dict(self.phi.items()), w)


class PaperInvariant(nn.Module):
    """I with e = 1 and D' = ``out``."""

    def __init__(self, d: int, out: int, D: int) -> None:
        super().__init__()
        self.phi = nn.ParameterDict({n: _init(a, d, 1, D, out) for n, a in PHI_I.items()})

    def forward(self, w: dict[str, Tensor]) -> Tensor:
        return invariant(dict(self.phi.items()), w).flatten(1)


def _init(axes: str, d: int, e: int, D: int, out: int = 1) -> nn.Parameter:
    sizes = shape(axes, d=d, e=e, D=D, out=out)
    fan = 2.0
    for n in sizes:
        fan *= n
    return nn.Parameter(torch.randn(sizes) * fan**-0.5)


class PaperModel(nn.Module):
    """The authors' model (see 1-mathematics.md): layers for each block, then their head."""

    def __init__(
        self, D: int, blocks: int, channels: list[int], classifier: int, embedding: int = 0
    ) -> None:
        super().__init__()
        n = channels[-1]
        self.equivariant = nn.ModuleList()
        self.invariant = nn.ModuleList()
        for _ in range(blocks):
            pairs = zip([1, *channels[:-1]], channels, strict=True)
            self.equivariant.append(nn.ModuleList([PaperEquivariant(d, e, D) for d, e in pairs]))
            self.invariant.append(nn.Sequential(PaperInvariant(n, n, D), nn.LayerNorm(n)))
        self.mlp = nn.Sequential(
            nn.LayerNorm(blocks * n),
            nn.Linear(blocks * n, 10),
            nn.LayerNorm(10),
            nn.ReLU(),
            nn.Linear(10, 10),
            nn.LayerNorm(10),
            nn.ReLU(),
            nn.Linear(10, 10),
        )
        self.classifier = nn.Sequential(
            nn.Linear(classifier, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10)
        )
        self.embedding = nn.Linear(embedding, 10) if embedding else None
        self.head = nn.Linear(20 + 10 * bool(embedding), 1)

    def forward(self, inputs: dict[str, object]) -> Tensor:
        parts = []
        blocks: list[dict[str, Tensor]] = inputs["blocks"]  # type: ignore[assignment]
        for layers, last, w in zip(self.equivariant, self.invariant, blocks, strict=True):
            for layer in layers:  # type: ignore[union-attr]
                w = layer(w)
                w = {n: x.relu() if n in ("W_A", "W_B", "b_A", "b_B") else x for n, x in w.items()}
            parts.append(last(w))
        parts = [self.mlp(torch.cat(parts, -1))]
        parts.append(self.classifier(inputs["classifier"]))
        if self.embedding is not None:
            parts.append(self.embedding(inputs["embedding"]))
        return torch.sigmoid(self.head(torch.cat(parts, -1))).squeeze(-1)
