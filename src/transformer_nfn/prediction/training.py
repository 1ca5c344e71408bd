"""Training neural predictors: all seeds together, resumable, the best epoch by validation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from transformer_nfn.io.files import write_text
from transformer_nfn.models import map_network
from transformer_nfn.prediction.batches import Batch, epoch_batches, steps
from transformer_nfn.prediction.dataset import Dataset, Parts, in_batches
from transformer_nfn.prediction.graph_step import GraphSteps
from transformer_nfn.prediction.kinds import Kinds, as_kinds
from transformer_nfn.prediction.log import read_log
from transformer_nfn.prediction.manner import AsRead, manner_of
from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import LOG_FILE, RunError
from transformer_nfn.prediction.training_state import STATE_FILE, read_state, write_state

SAVE_SECONDS = 20.0

Report = Callable[[dict[str, Any]], None]


@dataclass
class Trained:
    """The best state of every seed, and how it got there.

    Attributes:
        modules: one for each seed, at its best epoch.
        best_epoch: of each seed, counted from 1.
        val_tau: of each seed at that epoch.
        read: the training networks of each kind as the modules read them, further ones last.
    """

    modules: list[nn.Module]
    best_epoch: list[int]
    val_tau: list[float]
    read: list[Dataset]


class SeedTrainer:
    """Trains one module for each seed on the same networks, in one pass over stacked parameters.

    Every seed has its own initialisation and its own order of the networks, both drawn from the
    seed alone, so a seed's result does not depend on which others it was trained with beyond
    rounding. Adam acts on each number by itself, so one optimiser over stacked parameters is as
    many optimisers as there are seeds.

    On a GPU everything an epoch needs lies there before its first step: the networks, the orders
    (drawn there, so they are others than on a CPU) and the learning rates. A step of seeds
    together, also of one seed, is a CUDA graph; see `GraphSteps`.

    Of several kinds of networks every step takes one kind; see `epoch_batches`. The best epoch is
    that of the highest τ over the validation networks of all kinds together: those of one kind
    may be a handful, and a predictor of several kinds is asked which of two unlike networks is
    better as well.

    Args:
        build: makes a fresh module; called after ``torch.manual_seed(seed)``.
        parts: what to train on and select by, of one kind or several, on one device.
        protocol: how.
        seeds: which.
        together: whether seeds share each step, which is faster; otherwise one after another
            within each step.
        capture: whether steps on a GPU are captured as CUDA graphs; otherwise they compute the
            same, operation by operation.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        parts: Parts | Kinds,
        protocol: Protocol,
        seeds: list[int],
        *,
        together: bool,
        capture: bool = True,
    ) -> None:
        self.protocol, self.seeds = protocol, seeds
        kinds = as_kinds(parts)
        self.device = device = kinds.train[0].accuracy.device
        on_gpu = device.type == "cuda"
        self.modules = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.modules.append(build().to(device))
        first = self.modules[0]
        self.manner = manner_of(first)
        self.together = together and self.manner.stacked and (len(seeds) > 1 or on_gpu)
        self.kinds = self.manner.read(kinds)
        self.per_epoch = self.manner.per_epoch(self.kinds.train)
        self.own = [AsRead.plain(self.kinds)] * len(seeds)
        self.begun = 0
        self.epoch = 0
        self.best_epoch = [0] * len(seeds)
        self.val_tau = [-2.0] * len(seeds)
        if self.together:
            stacked, buffers = stack_module_state(self.modules)
            self.state = {k: v.detach().requires_grad_() for k, v in stacked.items()}
            self.buffers = buffers
        else:
            self.state = {
                f"{i}.{k}": p for i, m in enumerate(self.modules) for k, p in m.named_parameters()
            }
        self.optimiser = self.manner.optimiser(self.state, protocol.lr, device)
        self.rate: Tensor | None = None
        if on_gpu:
            self.hold_rate(torch.zeros((), dtype=torch.float32, device=device))
        self.graphs = GraphSteps(self.optimiser) if on_gpu and capture else None
        self.best = {k: v.detach().clone() for k, v in self.state.items()}

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return sum(steps(count, self.protocol.batch) for count in self.per_epoch)

    def begin(self) -> Iterator[int]:
        """What modules do before they are trained, see `Manner`; each seed before its turn."""
        for i, (seed, module) in enumerate(zip(self.seeds, self.modules, strict=True)):
            yield seed
            fresh = i >= self.begun
            self.own[i] = self.manner.begin(
                module, self.kinds, seed, self.protocol.epochs, fresh
            )
            self.begun = max(self.begun, i + 1)

    def _logits_together(self, network: Mapping[str, Any], shared: bool) -> Tensor:
        base = self.modules[0]

        def logits(state: dict[str, Tensor], buffers: dict[str, Tensor], data: Any) -> Tensor:
            out: Tensor = functional_call(base, (state, buffers), (data,))
            return out

        with _as_logits(base):
            spread = vmap(logits, in_dims=(0, 0, None if shared else 0))
            out: Tensor = spread(self.state, self.buffers, network)
        return out

    def hold_rate(self, tensor: Tensor) -> None:
        """From now on the optimiser reads the learning rate from this tensor, on its device."""
        self.rate = tensor
        for group in self.optimiser.param_groups:
            group["lr"] = tensor

    def epoch_rates(self) -> list[float]:
        """The learning rate of every step of the next epoch."""
        first = self.epoch * self.steps_per_epoch
        return [
            self.protocol.learning_rate(first + step, self.steps_per_epoch)
            for step in range(self.steps_per_epoch)
        ]

    def train_epoch(self) -> float:
        """One pass over the training networks; the mean loss over steps and seeds."""
        total = self.run_steps(*self.epoch_plan())
        self.epoch += 1
        return float(total) / self.steps_per_epoch

    def epoch_plan(self) -> tuple[list[Batch], list[float] | Tensor]:
        """For the next epoch the batches, and the rate of every step.

        On the device of the networks, the rates too where the optimiser reads them there.
        """
        sizes = [len(data) for data in self.kinds.train]
        how = (self.per_epoch, self.protocol.batch, self.seeds, self.epoch, self.device)
        batches, rates = epoch_batches(sizes, *how), self.epoch_rates()
        if self.rate is None:
            return batches, rates
        return batches, torch.tensor(rates, dtype=self.rate.dtype).to(self.device)

    def run_steps(self, batches: list[Batch], rates: list[float] | Tensor) -> Tensor:
        """The steps of a plan; the sum of their losses.

        Waits for a GPU only where it captures: the next step is launched while one runs.
        """
        total = torch.zeros((), device=self.device)
        for rate, batch in zip(rates, batches, strict=True):
            self._use_rate(rate)
            step = partial(self._step, batch.kind)
            if self.graphs is None:
                total += step(batch.picks)
            else:
                total += self.graphs(step, batch.picks, of=batch.kind)
        return total

    def _use_rate(self, rate: float | Tensor) -> None:
        if self.rate is not None:
            self.rate.copy_(rate)  # type: ignore[arg-type]
            return
        for group in self.optimiser.param_groups:
            group["lr"] = rate

    def _step(self, kind: int, picks: Tensor) -> Tensor:
        """One update of every seed by networks of one kind, ``[seeds, batch]``; the loss."""
        picks = picks.contiguous()
        self.optimiser.zero_grad(set_to_none=True)
        target = self.kinds.train[kind].accuracy[picks]
        if self.together:
            network = map_network(self.own[0].train[kind], lambda w: w[picks])
            logits = self._logits_together(network, shared=False)
            # A sum over seeds: each seed's gradient is that of its own mean.
            loss = binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1).sum()
            loss.backward()
            value = loss.detach() / len(self.seeds)
        else:
            value = torch.zeros((), device=target.device)
            for i, module in enumerate(self.modules):
                network = map_network(self.own[i].train[kind], lambda w, i=i: w[picks[i]])
                loss = self.manner.loss(module.logits(network), target[i])  # type: ignore[operator]
                loss.backward()
                value += loss.detach() / len(self.seeds)
        self.optimiser.step()
        return value

    @torch.no_grad()
    def predict(self, kind: int) -> Tensor:
        """What every seed says now of a kind's validation networks, ``[seeds, n]``, 0 to 1."""
        data = self.kinds.val[kind]
        if self.together:
            logits = partial(self._logits_together, shared=True)
            said = in_batches(logits, self.own[0].val[kind], data)
        else:
            pairs = zip(self.modules, self.own, strict=True)
            said = torch.stack([in_batches(m.logits, own.val[kind], data) for m, own in pairs])  # type: ignore[arg-type]
        return torch.sigmoid(said).cpu()

    def select(self) -> list[float]:
        """Measures τ on the validation part and keeps the state of every seed that improved."""
        accuracy = torch.cat([data.accuracy for data in self.kinds.val]).cpu().numpy()
        said = torch.cat([self.predict(kind) for kind in range(len(self.kinds.val))], 1)
        taus = [kendall_tau(accuracy, p.numpy()) for p in said]
        for i, tau in enumerate(taus):
            if tau > self.val_tau[i]:
                self.val_tau[i], self.best_epoch[i] = tau, self.epoch
                for name, value in self.state.items():
                    if self.together:
                        self.best[name][i] = value.detach()[i]
                    elif name.startswith(f"{i}."):
                        self.best[name].copy_(value.detach())
        return taus

    def result(self) -> Trained:
        """The best module of every seed."""
        for i, module in enumerate(self.modules):
            own = {
                name: (self.best[name][i] if self.together else self.best[f"{i}.{name}"])
                for name, _ in module.named_parameters()
            }
            module.load_state_dict(own, strict=False)
            self.manner.finish(module, self.kinds, self.own[i])
        modules, train = list(self.modules), self.kinds.train
        return Trained(modules, list(self.best_epoch), list(self.val_tau), train)

    def save(self, path: Path, identity: str) -> None:
        """Writes the whole state, see `training_state`."""
        about = {
            "begun": self.begun,
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "val_tau": self.val_tau,
        }
        write_state(path, identity, self.state, self.best, self.optimiser, about)

    def load(self, path: Path, identity: str) -> None:
        """Takes up what `save` wrote; refuses the state of another training."""
        about = read_state(path, identity, self.state, self.best, self.optimiser)
        # The optimiser has tensors of its own now, in place of those it was given and captured.
        if self.rate is not None:
            self.hold_rate(self.rate)
        if self.graphs is not None:
            self.graphs.forget()
        self.epoch, self.begun = int(about["epoch"]), int(about["begun"])
        self.best_epoch = [int(e) for e in about["best_epoch"]]
        self.val_tau = [float(t) for t in about["val_tau"]]


class _as_logits:  # noqa: N801
    """Within it, calling a module gives its logits: `functional_call` knows `forward` alone."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.module.forward = self.module.logits  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        del self.module.forward


def train_seeds(
    build: Callable[[], nn.Module],
    parts: Parts | Kinds,
    protocol: Protocol,
    seeds: list[int],
    *,
    folder: Path | None = None,
    identity: str = "",
    together: bool = True,
    report: Report | None = None,
    save_every: float = SAVE_SECONDS,
) -> Trained:
    """Trains every seed and returns each at its best epoch by validation τ.

    Args:
        build: makes a fresh module with ``logits(network)``.
        parts: training and validation networks of one kind or several, on the device to use.
        protocol: how.
        seeds: which.
        folder: where the log and the state to resume from are kept; None keeps nothing.
        identity: identifies the training; a state of another one is refused.
        together: see `SeedTrainer`.
        report: called with every line of the log.
        save_every: seconds between two saved states; saving costs four times the parameters.
    """
    trainer = SeedTrainer(build, parts, protocol, seeds, together=together)
    state = folder / STATE_FILE if folder is not None else None
    log: list[str] = []
    if folder is not None and state is not None and state.is_file():
        try:
            trainer.load(state, identity)
        except RunError:
            raise
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            raise RunError(
                f"'{state}' is damaged, choose another --out or remove it ({error})"
            ) from error
        lines = read_log(folder / LOG_FILE) if (folder / LOG_FILE).is_file() else []
        log = [json.dumps(line) for line in lines if line["epoch"] <= trainer.epoch]
    saved = time.monotonic()
    for seed in trainer.begin():
        if report is not None and trainer.manner.beginning:
            report({"note": f"seed {seed} {trainer.manner.beginning}"})
        if state is not None and trainer.begun and time.monotonic() - saved >= save_every:
            trainer.save(state, identity)
            saved = time.monotonic()
    while trainer.epoch < protocol.epochs:
        rate = trainer.epoch_rates()[-1]
        loss = trainer.train_epoch()
        taus = trainer.select()
        for seed, tau in zip(seeds, taus, strict=True):
            line = {"seed": seed, "epoch": trainer.epoch, "loss": loss, "val_tau": tau, "lr": rate}
            log.append(json.dumps(line))
        if report is not None:
            mean = sum(taus) / len(taus)
            report(
                {"epoch": trainer.epoch, "epochs": protocol.epochs, "loss": loss, "val_tau": mean}
            )
        last = trainer.epoch == protocol.epochs
        due = time.monotonic() - saved >= save_every
        if folder is not None and state is not None and (last or due):
            write_text(folder / LOG_FILE, "\n".join(log) + "\n")
            if not last:
                trainer.save(state, identity)
                saved = time.monotonic()
    return trainer.result()
