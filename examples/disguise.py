"""Disguise a trained block: its weights change, its canonical form and its fingerprint do not."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

from transformer_nfn import symmetry
from transformer_nfn.testing import relative_error
from transformer_nfn.zoo import Zoo

zoo = Zoo.open("mnist-sample")
space = zoo.block_space
U = {name: w.double() for name, w in zoo.batch([0]).blocks()[0].items()}
V = space.group.random(torch.Generator().manual_seed(0)).act(U)
print(symmetry.compare(space, U, V))

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
places = np.arange(len(U))
forms = symmetry.canonical_form(space, U), symmetry.canonical_form(space, V)
for shift, label, (a, b) in ((-0.2, "weights", (U, V)), (0.2, "canonical form", forms)):
    errors = [max(relative_error(b[name], a[name]), 1e-16) for name in U]
    axes.barh(places + shift, errors, 0.4, label=label)
change = relative_error(symmetry.fingerprint(space, V), symmetry.fingerprint(space, U))
axes.barh(len(U), change, 0.4, label="fingerprint")
axes.set_yticks([*places, len(U)], [*U, "fingerprint"])
axes.set(xscale="log", xlim=(1e-16, 1e2), ylim=(len(U) + 0.7, -0.7))
axes.set_xlabel("relative change under a disguise")
axes.legend()
figure.savefig(sys.argv[1], dpi=110)
