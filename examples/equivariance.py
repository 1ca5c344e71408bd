"""Error of layer(gU) = g layer(U) by condition number of g and dtype."""

import sys

import matplotlib.pyplot as plt
import torch

from transformer_nfn import nn, spaces
from transformer_nfn.testing import relative_error

torch.manual_seed(0)
space = spaces.attention_block(d_model=32, heads=2, d_k=16, d_v=16, d_ff=64)
layer = nn.Equivariant(space, in_channels=1, out_channels=4)
conditions = [10.0**k for k in range(7)]

figure, axes = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
for dtype in (torch.float32, torch.float64):
    layer, U = layer.to(dtype), space.randn(batch=8, dtype=dtype)
    errors = []
    for condition in conditions:
        g = space.group.random(condition=condition)
        moved_first, moved_last = layer(g.act(U)), g.act(layer(U))
        errors.append(max(relative_error(moved_first[n], moved_last[n]) for n in space.tensors))
    axes.loglog(conditions, errors, "o-", label=str(dtype).removeprefix("torch."))
axes.set(xlabel="condition number of the matrices in g", ylabel="relative error, worst tensor")
axes.set_title("layer(gU) against g layer(U)")
axes.legend()
figure.savefig(sys.argv[1], dpi=110)
