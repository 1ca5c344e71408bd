"""How good is each network? Read from its weights alone, against what testing it gave."""

import sys

import matplotlib.pyplot as plt
import numpy as np

from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.predict import predict
from transformer_nfn.zoo import Zoo

zoo = Zoo.open("mnist-sample")
predictions = predict("mnist-boosting", zoo)
predicted = np.array([p.value for p in predictions])
reach = [[p.value - p.low for p in predictions], [p.high - p.value for p in predictions]]
accuracy = zoo.table["test_accuracy"]
tau = kendall_tau(accuracy, predicted)

figure, axes = plt.subplots(figsize=(5, 4.6), layout="constrained")
axes.errorbar(accuracy, predicted, yerr=reach, fmt="o", ms=4, lw=0.6, alpha=0.7)
axes.axline((0, 0), slope=1, color="grey", lw=1)
axes.set(xlabel="test accuracy, measured", ylabel="predicted, with its interval")
axes.set_title(f"{len(zoo)} MNIST networks, Kendall's τ {tau:.2f}")
figure.savefig(sys.argv[1], dpi=110)
