"""Spectra of QK and VO, invariant under the group, of accurate and inaccurate networks."""

import sys

import matplotlib.pyplot as plt
import torch

from transformer_nfn import symmetry
from transformer_nfn.zoo import Zoo

zoo = Zoo.open("mnist-sample")
accuracy = torch.as_tensor(zoo.table["test_accuracy"])
block = {name: w.double() for name, w in zoo.batch(range(len(zoo))).blocks()[0].items()}
numbers = range(1, 17)  # the products are 32 × 32, of rank 16

figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.4), sharey=True, layout="constrained")
products = symmetry.products(zoo.block_space, block)
for axes, (name, product) in zip(panels, products.items(), strict=True):
    spectra = torch.linalg.svdvals(product)[:, 0, :, :16].mean(1)  # mean over heads
    for low, high in ((0.0, 0.3), (0.3, 0.8), (0.8, 0.9), (0.9, 1.0)):
        group = spectra[(accuracy >= low) & (accuracy < high)]
        label = f"{low:.0%} to {high:.0%} ({len(group)} networks)"
        axes.semilogy(numbers, group.median(0).values, ".-", label=label)
    axes.set(title=f"{name} of the first block", xlabel="singular values, largest first")
    axes.set_xticks([1, 4, 8, 12, 16])
panels[0].set(ylabel="median over the networks")
figure.legend(*panels[0].get_legend_handles_labels(), title="test accuracy", loc="outside right")
figure.savefig(sys.argv[1], dpi=110)
