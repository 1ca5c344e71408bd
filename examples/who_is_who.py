"""Five networks and four disguises of each: distances of raw weights and of fingerprints."""

import sys

import matplotlib.pyplot as plt
import torch

from transformer_nfn import symmetry
from transformer_nfn.zoo import Zoo

zoo = Zoo.open("ag-news-sample")
space = zoo.space
rows = zoo.select(min_accuracy=0.8)[:5]
U = {name: w.double().repeat_interleave(4, 0)[:, None] for name, w in zoo.weights(rows).items()}
V = space.group.random(torch.Generator().manual_seed(0), batch=20, condition=3).act(U)
raw = torch.cat([w.flatten(1) for w in V.values()], 1)
fingerprints = symmetry.fingerprint(space, V)

figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
pairs = (("raw weights", raw), ("fingerprints", fingerprints))
for axes, (title, vectors) in zip(panels, pairs, strict=True):
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    image = axes.imshow(distances.numpy(), cmap="magma")
    axes.set(title=f"distance of {title}", xlabel="row of the zoo, four disguises each")
    middles = [4 * i + 1.5 for i in range(5)]
    axes.set_xticks(middles, rows)
    axes.set_yticks(middles, rows)
    figure.colorbar(image, ax=axes, shrink=0.8)
figure.savefig(sys.argv[1], dpi=110)
