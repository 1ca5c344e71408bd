"""Trains a model whose step no CUDA graph can hold; run by a test, in a process of its own."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prediction"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))

from made_networks import parts

from transformer_nfn.models import MLP
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import SeedTrainer


class Waiting(MLP):
    """Waits for the GPU in the middle of its step."""

    def logits(self, network):
        torch.cuda.current_stream().synchronize()
        return super().logits(network)


def main() -> None:
    data = parts().to("cuda")
    layout = data.train.network.layout
    sizes = {part: layout.part(part) for part in ("embedding", "classifier")}
    kinds = {}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for capture in (True, False):
            held = SeedTrainer(
                lambda: Waiting(data.train.block_space, **sizes),
                data,
                Protocol(epochs=4),
                [0, 1],
                together=True,
                capture=capture,
            )
            for _ in range(2):
                held.train_epoch()
            kinds[capture] = held
    for warning in heard:
        print(warning.message, file=sys.stderr)
    said = sum("cannot be captured" in str(w.message) for w in heard)
    same = all(
        torch.allclose(v, kinds[False].state[k], rtol=1e-4, atol=1e-6)
        for k, v in kinds[True].state.items()
    )
    print(said, "warning,", "same" if same else "other", "weights")


if __name__ == "__main__":
    main()
