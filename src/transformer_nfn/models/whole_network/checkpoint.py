"""`WholeCheckpoint`: what `WholeNetwork` is, for checkpoints of any family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from transformer_nfn.models.batch import Batch, paper_block
from transformer_nfn.models.predictor import CHECKPOINTS, LearningSet, Variant, predictor
from transformer_nfn.models.pretrained import Inputs, Pretrained
from transformer_nfn.models.statistics import fit_ridge, mean_and_scale, standardised
from transformer_nfn.models.whole_network.checkpoint_probes import (
    MOST_TOKENS,
    ImageProbes,
    ProbeFormat,
    TokenProbes,
    checkpoint_outputs,
)
from transformer_nfn.models.whole_network.model import (
    INVARIANTS,
    OUTPUTS,
    WholeNetwork,
    head,
)
from transformer_nfn.models.whole_network.probes import (
    ProbeOutputs,
    Probes,
    class_features,
    class_width,
    outputs_vary,
)
from transformer_nfn.models.whole_network.search import sampled_texts
from transformer_nfn.spaces import WeightSpace

FEATURES = "features"
"""Key of a batch that holds invariants of the checkpoints."""
PROBES = 64
PENALTIES = tuple(10.0 ** (i / 2) for i in range(-8, 5))
"""Ridge penalties to choose from."""
SHARES = (0.0, 0.3, 1.0, 3.0)
"""Sizes of the invariants beside the outputs to choose from."""
EXTREME = 0.01
"""Targets closer to 0 or 1 count as this close: their logits would outweigh all others."""


class Reader(nn.Module):
    """A linear map, which is fitted in closed form, and an MLP that corrects it.

    >>> Reader(5, 4)(torch.zeros(2, 5)).shape
    torch.Size([2, 1])

    Args:
        width: number of inputs.
        hidden: neurons of the MLP.
    """

    weight: Tensor
    constant: Tensor

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(width))
        self.register_buffer("constant", torch.zeros(1))
        self.mlp = head(width, hidden)
        for parameter in self.mlp[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, width]`` to ``[…, 1]``."""
        out: Tensor = (x * self.weight).sum(-1, keepdim=True) + self.constant + self.mlp(x)
        return out


@predictor("whole_network")
class WholeCheckpoint(WholeNetwork):
    """`WholeNetwork` for checkpoints of one input format, of any family and size.

    One head reads outputs on probes, which go through the family's reference forward; the other
    reads invariants of the weights, which have to be in the batch. Zoos of checkpoints are small,
    so each head is a ridge regression that a small MLP corrects.

    >>> model = WholeCheckpoint(inputs="tokens", shape=(5, 100), classes=3)
    >>> model.probes().shape
    torch.Size([64, 5, 100])

    Args:
        space: not used.
        text: `ProbeFormat.text` of the networks.
        inputs: what probes are: images, mixtures of tokens, or vectors.
        shape: of one probe; of tokens the length, and how many tokens are mixed.
        classes: of the networks' outputs; of language models the size of the vocabulary is not
            needed, and 1 stands here.
        language: whether networks are language models.
        causal: whether their tokens see only those before them.
        invariants: number of invariants; 0 leaves them out.
        probes: number of probes; 0 leaves them out.
        rank: rank of the matrix of the probes of a group, for images and vectors.
        groups: number of groups of probes.
        hidden: neurons of both heads.
        curve: see `WholeNetwork`.
    """

    zoos = (CHECKPOINTS,)
    variants: ClassVar = {"probes": Variant("Whole network, probes alone", {"invariants": 0})}
    numbers: Tensor
    out_mean: Tensor
    out_scale: Tensor

    def __init__(
        self,
        space: WeightSpace | None = None,
        *,
        text: str = "",
        inputs: str = "images",
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        language: bool = False,
        causal: bool = False,
        invariants: int = 0,
        probes: int = PROBES,
        rank: int = 32,
        groups: int = 2,
        hidden: int = 16,
        curve: int = 0,
    ) -> None:
        Pretrained.__init__(self)
        self.space = paper_block() if space is None else space
        self._config = {
            "text": text, "inputs": inputs, "shape": list(shape), "classes": classes,
            "language": language, "causal": causal, "invariants": invariants, "probes": probes,
            "rank": rank, "groups": groups, "hidden": hidden,
        }  # fmt: skip
        self.language, self.causal = language, causal
        self.probes: Probes | TokenProbes | None = None
        if probes and inputs == "images":
            self.probes = ImageProbes(probes, tuple(shape), classes, rank, groups=groups)
        elif probes and inputs == "tokens":
            length, tokens = shape
            self.probes = TokenProbes(probes, length, tokens, classes, groups=groups)
            self.register_buffer("numbers", torch.arange(tokens).float())
        elif probes:
            length, width = shape
            self.probes = Probes(probes, length, width, classes, rank, groups=groups)
        self.output_head = None
        if probes:
            count = 2 * (probes + shape[0]) if language else class_width(probes, classes)
            self.register_buffer("out_mean", torch.zeros(count))
            self.register_buffer("out_scale", torch.ones(count))
            self.output_head = Reader(count, hidden)
        self.register_buffer("mean", torch.zeros(invariants))
        self.register_buffer("scale", torch.ones(invariants))
        self.invariant_head = Reader(invariants, hidden) if invariants else None
        self._add_curve(curve)

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these."""
        batch = data.network
        form = ProbeFormat.of(batch.layouts[0])
        length, *sizes = form.shape
        if form.inputs == "tokens":
            sizes = [min(sizes[0], MOST_TOKENS)]
        arguments: dict[str, Any] = {
            "text": form.text, "inputs": form.inputs, "shape": (length, *sizes),
            "classes": 1 if form.language else form.outputs, "language": form.language,
            "causal": form.causal, "invariants": batch.computed[FEATURES].shape[1],
        }  # fmt: skip
        model = cls(**(arguments | options))
        if model.probes is not None and form.inputs == "tokens":
            chosen = torch.randperm(form.shape[1])[: len(model.numbers)]
            model.numbers.copy_(chosen.sort().values)
        return model

    def prepared(self, batch: Batch, positions: Tensor | None = None) -> Batch:
        """The networks with their invariants in single precision."""
        if INVARIANTS in batch.computed:
            return batch
        return batch.plus(INVARIANTS, batch.computed[FEATURES][:, : len(self.mean)].float())

    def outputs(
        self, batch: Batch, inputs: Tensor, positions: Tensor | None = None
    ) -> ProbeOutputs:
        """Class logits of the networks on inputs like the probes; of tokens behind the last one.

        Where tokens see each other, the mean over tokens.
        """
        out = checkpoint_outputs(batch, inputs, self.ids)
        if out.ndim == 4:
            out = out[:, :, -1] if self.causal else out.mean(2)
        return ProbeOutputs(out, out)

    def start(
        self, train: Sequence[LearningSet], val: Sequence[LearningSet], seed: int, epochs: int, *,
        fresh: bool,
    ) -> Inputs:  # fmt: skip
        """Also fit the linear maps of the heads."""
        inputs = super().start(train, val, seed, epochs, fresh=fresh)
        self.fit_linear(inputs[0][0], train[0].accuracy)
        return inputs

    def search_probes(
        self, train: Sequence[LearningSet], seed: int, steps: int, per_group: int
    ) -> None:
        """Of classifiers as of any networks; causal language models write the probes.

        These are texts that training networks sample. Other language models keep random ones.
        """
        data: Any = train[0]
        if not self.language:
            # CUDA graphs need one size.
            places = torch.arange(len(data), device=data.accuracy.device)
            each = [
                replace(data.take(places[rows]), network=alone)
                for rows, alone in data.network.by_size()
            ]
            super().search_probes(each, seed, steps, per_group)
        elif self.causal and isinstance(self.probes, TokenProbes):
            ids = self.ids

            def answers(batch: Batch, inputs: Tensor) -> Tensor:
                return checkpoint_outputs(batch, inputs, ids)[..., ids]

            self.probes.set_ids(sampled_texts(answers, self.probes, data, seed), exactly=True)

    @torch.no_grad()
    def fit_linear(self, inputs: Batch, target: Tensor) -> None:
        """Standardise outputs, and fit the linear maps of both heads by ridge regression.

        Penalty and size of the invariants are those of least leave-one-out error.

        Args:
            inputs: `head_inputs` of the training networks.
            target: between 0 and 1, ``[n]``.
        """
        if self.output_head is not None:
            mean, scale = mean_and_scale(inputs.computed[OUTPUTS].double())
            self.out_mean.copy_(mean)
            self.out_scale.copy_(scale)
        logits = target.double().clamp(EXTREME, 1 - EXTREME).logit()
        both = self.output_head is not None and self.invariant_head is not None
        fits = {
            share: fit_ridge(self._blocks(inputs, share), logits, PENALTIES)
            for share in (SHARES if both else (1.0,))
        }
        share = min(fits, key=lambda share: fits[share].error)
        start = 0
        for module in self._readers():
            end = start + len(module.weight)
            module.weight.copy_(fits[share].weight[start:end] * self._block_scale(module, share))
            module.constant.zero_()
            start = end
        self._readers()[0].constant.fill_(fits[share].constant)

    def _blocks(self, inputs: Batch, share: float) -> Tensor:
        """Inputs of all heads side by side, each of size 1, but invariants of size ``share``."""
        blocks = []
        for module, x in self._features(inputs, None):
            if module is self.invariant_head:
                x = x * self._share(inputs)[:, None]
            blocks.append(x.double() * self._block_scale(module, share))
        return torch.cat(blocks, -1)

    def _block_scale(self, module: nn.Module, share: float) -> float:
        width = module.get_buffer("weight").numel()
        return (share if module is self.invariant_head else 1.0) / math.sqrt(width)

    @property
    def text(self) -> str:
        """`ProbeFormat.text` of the probes, empty without probes."""
        return str(self._config["text"]) if self.probes is not None else ""

    @property
    def ids(self) -> Tensor | None:
        """Tokens that probes are mixed of, ``[tokens]``; None for other inputs."""
        return self.numbers.long() if self._config["inputs"] == "tokens" else None

    def _readers(self) -> list[Reader]:
        return [m for m in (self.output_head, self.invariant_head) if m is not None]

    def _output_inputs(self, outputs: Tensor) -> Tensor:
        return standardised(outputs, self.out_mean, self.out_scale)

    def _with_outputs(self, batch: Batch, positions: Tensor | None) -> Batch:
        batch = self.prepared(batch)
        if self.probes is None or OUTPUTS in batch.computed:
            return batch
        probes = self.probes()
        if not self.language:
            features = torch.cat(class_features(self.outputs(batch, probes).logits), -1)
        else:
            targets = self.numbers.long()[probes.argmax(-1)]
            read = partial(language_features, targets=targets, causal=self.causal)
            features = checkpoint_outputs(batch, probes, self.ids, read)
        return batch.plus(OUTPUTS, features)

    def _share(self, batch: Batch) -> Tensor:
        if self.probes is None or self.language:
            return self.mean.new_ones(len(batch))
        outputs = batch.computed[OUTPUTS]
        return outputs_vary(outputs, self._config["probes"], self._config["classes"])


def language_features(logits: Tensor, targets: Tensor, causal: bool) -> Tensor:
    """Logits ``[n, P, L, vocab]`` on texts of the tokens ``[P, L]``, ``[n, 2 P + 2 L]``.

    Log-probability of the next token (of the token itself where tokens see each other) and
    entropy, over the logarithm of the vocabulary: mean of each text, and of each position.
    """
    log_p = logits.log_softmax(-1) / math.log(logits.shape[-1])
    entropy = -(log_p * logits.softmax(-1)).sum(-1)
    at = targets.roll(-1, 1) if causal else targets
    of_token = log_p.gather(-1, at[None, ..., None].expand(len(logits), -1, -1, 1)).squeeze(-1)
    seen = of_token[:, :, :-1] if causal else of_token
    padded = torch.nn.functional.pad(seen.mean(1), (0, logits.shape[2] - seen.shape[2]))
    return torch.cat([seen.mean(2), entropy.mean(2), padded, entropy.mean(1)], -1)
