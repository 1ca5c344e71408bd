"""The paper's action (eq. 14), letter by letter, with permutation matrices and loops over heads."""

import torch

from transformer_nfn.spaces import Weights
from transformer_nfn.symmetry import Element


def permutation_matrix(pi: torch.Tensor) -> torch.Tensor:
    """``P_π = I[:, π]``: the columns of the identity permuted by π."""
    return torch.eye(len(pi), dtype=torch.float64)[:, pi]


def act(g: Element, U: Weights) -> Weights:
    """``gU`` for one network with tensors ``[*axes]``."""
    tau = g.perms["head"]
    M, N = g.linears["qk"].mT, g.linears["vo"]
    P_O, P_A = permutation_matrix(g.perms["feature"]), permutation_matrix(g.perms["neuron"])
    heads = range(len(tau))
    return {
        "W_Q": torch.stack([U["W_Q"][tau[i]] @ M[tau[i]].T for i in heads]),
        "W_K": torch.stack([U["W_K"][tau[i]] @ torch.linalg.inv(M[tau[i]]) for i in heads]),
        "W_V": torch.stack([U["W_V"][tau[i]] @ N[tau[i]] for i in heads]),
        "W_O": torch.stack([torch.linalg.inv(N[tau[i]]) @ U["W_O"][tau[i]] @ P_O for i in heads]),
        "W_A": P_O.T @ U["W_A"] @ P_A,
        "W_B": P_A.T @ U["W_B"],
        "b_A": U["b_A"] @ P_A,
        "b_B": U["b_B"],
    }
