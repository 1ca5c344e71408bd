"""How do the units of a sublayer and those on its sides speak to each other?

With entries ``w`` (head ``a``, unit ``i`` inside, unit ``j`` on side ``s``) and functions ``f_k``

    to side s:  m_j = Θ_s Σ_a Σ_k Σ_i f_k(w_aij) · (g_ak ⊙ Φ_k x_i) / (h √I)
    to inside:  m_i = Σ_k Φ'_k Σ_a g'_ak ⊙ (Σ_s Σ_j f_k(w_aij) Θ'_s x_j) / (h √J)

where the matrices Θ and Φ are the same for all units, heads and blocks, the gates g are made from
the features of head a (there are none without heads), and J counts the units of all sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from transformer_nfn.nn.roles.edges import FUNCTIONS, Edges


class Messages(nn.Module):
    """Both directions along the edges of one sublayer.

    Args:
        channels: of every unit.
        sides: how many there are.
        heads: whether the sublayer has heads.
        inwards: whether the units inside listen; pixels and places do not.
    """

    def __init__(
        self, channels: int, sides: int, heads: bool = False, inwards: bool = True
    ) -> None:
        super().__init__()
        self.channels = channels
        self.from_inside = nn.Linear(channels, FUNCTIONS * channels, bias=False)
        self.to_side = _matrices(sides, channels)
        if inwards:
            self.from_side = _matrices(sides, channels)
            self.to_inside = nn.Linear(FUNCTIONS * channels, channels, bias=False)
        self.gates = nn.Linear(channels, 2 * FUNCTIONS * channels) if heads else None

    def outwards(self, edges: Edges, inside: Tensor, gate: Tensor | None = None) -> list[Tensor]:
        """Messages ``[b, J, c]`` to each side from the units inside, ``[b, I, c]``.

        Args:
            edges: of the sublayer.
            inside: units of the rows.
            gate: ``[b, h, 2, 1, c]``, the first of `head_gates`.
        """
        b, h, _, rows, columns = edges.values.shape
        sent = self.from_inside(inside).view(b, rows, FUNCTIONS, self.channels).transpose(1, 2)
        if gate is not None:
            sent = sent.unsqueeze(1) * gate
        values = edges.values.view(b, -1, columns)
        sums = torch.bmm(values.mT, sent.reshape(b, -1, self.channels))
        parts = (sums / (h * rows**0.5)).split(edges.sizes, 1)
        return [layer(part) for layer, part in zip(self.to_side, parts, strict=True)]

    def gathered(self, edges: Edges, sides: Sequence[Tensor]) -> Tensor:
        """The inner sums ``Σ_s Σ_j f_k(w_aij) Θ'_s x_j / √J``, ``[b, h, 2, I, c]``."""
        b, h, _, rows, columns = edges.values.shape
        sent = [layer(x) for layer, x in zip(self.from_side, sides, strict=True)]
        scaled = torch.cat(sent, 1) / columns**0.5
        sums = torch.bmm(edges.values.view(b, -1, columns), scaled)
        return sums.view(b, h, FUNCTIONS, rows, self.channels)

    def inwards(self, gathered: Tensor, gate: Tensor | None = None) -> Tensor:
        """Messages ``[b, I, c]`` to the units inside; ``gate`` is the second of `head_gates`."""
        gated = gathered if gate is None else gathered * gate
        out: Tensor = self.to_inside(gated.mean(1).transpose(1, 2).flatten(2))
        return out

    def head_gates(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """For both directions ``1 + …`` of heads ``[b, h, c]``, ``[b, h, 2, 1, c]`` each."""
        assert self.gates is not None
        made = 1 + self.gates(heads)
        shaped = made.view(*heads.shape[:2], 2, FUNCTIONS, 1, self.channels)
        return shaped[:, :, 0], shaped[:, :, 1]


class Update(nn.Module):
    """``LayerNorm(x + MLP(x, m))``, the same for every unit of a role.

    Args:
        channels: of every unit.
        messages: width of m.
    """

    def __init__(self, channels: int, messages: int) -> None:
        super().__init__()
        self.first = nn.Linear(channels + messages, 2 * channels)
        self.second = nn.Linear(2 * channels, channels)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor, messages: Tensor) -> Tensor:
        """Units ``[…, c]`` and messages ``[…, m]`` to units."""
        inner = nn.functional.silu(self.first(torch.cat([x, messages], -1)))
        out: Tensor = self.norm(x + self.second(inner))
        return out


def _matrices(count: int, channels: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(count))
