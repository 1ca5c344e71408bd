"""Training of neural predictors: all seeds together, resumable, best epoch by validation τ."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import clip_grad_norm_

from transformer_nfn.io.files import write_text
from transformer_nfn.io.json_fields import json_text, parse_object
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.models import Batch
from transformer_nfn.models.cuda_graphs import GraphSteps
from transformer_nfn.models.pretrained import Inputs, Pretrained
from transformer_nfn.prediction.data import Dataset, Parts, SizeGroups
from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.predictors import prepared
from transformer_nfn.prediction.protocol import Plateau, Protocol
from transformer_nfn.prediction.runs import LOG_FILE, RunError, read_log

STATE_FILE = "training.safetensors"
ADAM = {"step", "exp_avg", "exp_avg_sq"}
"""What Adam keeps of each parameter."""
SAVE_SECONDS = 20.0

Report = Callable[[dict[str, Any]], None]
"""Called with every line of the log, and with notes."""


@dataclass(frozen=True)
class Execution:
    """How a training runs; none of it changes the result.

    Attributes:
        folder: where the log and the state to resume from are kept; None keeps nothing.
        identity: identifies the training; the state of another one is rejected.
        report: progress callback.
        save_every: seconds between two saved states.
        together: whether seeds share each step, see `SeedTrainer`.
    """

    folder: Path | None = None
    identity: str = ""
    report: Report | None = None
    save_every: float = SAVE_SECONDS
    together: bool = True


@dataclass(frozen=True)
class Trained:
    """The best state of every seed.

    Attributes:
        modules: one for each seed, at its best epoch.
        best_epoch: of each seed, counted from 1.
        val_tau: of each seed at that epoch.
        train: training networks of each size as the modules read them, additional ones last.
        updates: of each seed.
    """

    modules: list[Pretrained]
    best_epoch: list[int]
    val_tau: list[float]
    train: list[Dataset]
    updates: int


@dataclass(frozen=True)
class Picks:
    """Networks of one size for one step.

    Attributes:
        group: index of their data set.
        picks: their rows, ``[seeds, batch]``.
    """

    group: int
    picks: Tensor


class SeedTrainer:
    """Train one module per seed on the same networks, in one pass over stacked parameters.

    Every seed draws its initialisation and its order of the networks from the seed alone, so its
    result does not depend on the other seeds beyond rounding. Adam acts on each number separately,
    so one optimiser over stacked parameters equals one optimiser per seed; seeds that are not
    stacked have an optimiser each, and take turns.

    On a GPU everything an epoch needs is there before its first step: the networks, the orders
    (drawn there, so they differ from those on a CPU) and the learning rates. A step, of stacked
    seeds or of one, is a CUDA graph, see `GraphSteps`.

    Every step takes networks of one size, see `_epoch_batches`. The best epoch has the highest τ
    over the validation networks of all sizes together.

    Args:
        build: makes a fresh module with ``logits(network)``, after ``torch.manual_seed(seed)``.
        networks: training and validation networks, on one device.
        protocol: how.
        seeds: which.
        together: whether seeds share each step, which is faster.
        capture: whether steps on a GPU are captured as CUDA graphs.
    """

    def __init__(
        self,
        build: Callable[[], Pretrained],
        networks: Parts | SizeGroups,
        protocol: Protocol,
        seeds: list[int],
        *,
        together: bool,
        capture: bool = True,
    ) -> None:
        self.protocol, self.seeds = protocol, seeds
        groups = SizeGroups.of(networks)
        self.device = device = groups.train[0].accuracy.device
        on_gpu = device.type == "cuda"
        self.modules = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.modules.append(build().to(device))
        first = self.modules[0]
        stackable = first.stacked and not protocol.alone
        self.together = together and stackable and (len(seeds) > 1 or on_gpu)
        groups = groups.map(partial(_as_read, first))
        self.train, self.val = groups.train, groups.val
        runs = [len(set(data.runs)) for data in self.train]
        self.per_epoch = first.networks_per_epoch([len(data) for data in self.train], runs)
        if protocol.updates:  # those of each size by its share, all batches full
            total = sum(self.per_epoch)
            shares = [-(-protocol.updates * n // total) for n in self.per_epoch]
            self.per_epoch = [protocol.batch * share for share in shares]
        if first.code is not None:  # BatchNorm cannot learn from one network
            self.per_epoch = [n - (n % protocol.batch == 1 < n) for n in self.per_epoch]
        inputs = [data.network for data in self.train], [data.network for data in self.val]
        self.inputs: list[Inputs] = [inputs] * len(seeds)
        self.started = 0
        self.epoch = 0
        self.best_epoch = [0] * len(seeds)
        self.val_tau = [-2.0] * len(seeds)
        if self.together:
            stacked, self.buffers = stack_module_state(self.modules)
            self.state = {k: v.detach().requires_grad_() for k, v in stacked.items()}
        else:
            self.state = {
                f"{i}.{k}": p for i, m in enumerate(self.modules) for k, p in m.named_parameters()
            }
        own = [module.own_optimiser(protocol.lr) for module in self.modules]
        self.own_optimisers = [each for each in own if each is not None]
        options = {"lr": protocol.lr, "fused": device.type in ("cpu", "cuda"), "capturable": on_gpu}
        prefixes = [""] if self.together else [f"{i}." for i in range(len(seeds))]
        self.optimisers = self.own_optimisers or [
            first.optimiser({k: v for k, v in self.state.items() if k.startswith(p)}, **options)
            for p in prefixes
        ]
        self.peaks = [[g["lr"] for g in each.param_groups] for each in self.optimisers]
        self.plateaus = [Plateau(protocol.patience) for _ in seeds]
        self.rates: Tensor | None = None
        if on_gpu and not self.own_optimisers:
            self.hold_rates(torch.float32)
        captured = on_gpu and capture and first.captured
        self.graphs = GraphSteps(*self.optimisers) if captured else None
        self.best = {k: v.detach().clone() for k, v in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters, and what modules keep besides, by seed and name."""
        kept = enumerate(self.modules)
        return self.state | {f"{i}.{k}": v for i, m in kept for k, v in m.kept_state().items()}

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one epoch."""
        return sum(_num_batches(count, self.protocol.batch) for count in self.per_epoch)

    def start(self) -> Iterator[int]:
        """Set up the module of each seed, see `Pretrained.start`; yields the seed first."""
        for i, (seed, module) in enumerate(zip(self.seeds, self.modules, strict=True)):
            yield seed
            fresh = i >= self.started
            epochs = self.protocol.epochs
            self.inputs[i] = module.start(self.train, self.val, seed, epochs, fresh=fresh)
            self.started = max(self.started, i + 1)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Groups of parameters of all optimisers."""
        return [group for each in self.optimisers for group in each.param_groups]

    def hold_rates(self, dtype: torch.dtype) -> None:
        """Let the optimisers read their learning rates from a tensor on the device."""
        if self.rates is None:
            self.rates = torch.zeros(len(self._groups), dtype=dtype, device=self.device)
        for group, rate in zip(self._groups, self.rates, strict=True):
            group["lr"] = rate

    def epoch_rates(self) -> list[list[float]]:
        """Learning rates of every step of the next epoch, one for each group of parameters."""
        first, steps = self.epoch * self.steps_per_epoch, self.steps_per_epoch
        shares = [
            peak / self.protocol.lr * plateau.factor
            for peaks, plateau in zip(self.peaks, self.plateaus, strict=False)
            for peak in peaks
        ]
        rates = [self.protocol.learning_rate(first + step, steps) for step in range(steps)]
        return [[rate * share for share in shares] for rate in rates]

    def train_epoch(self) -> float:
        """Train one epoch; returns the mean loss over steps and seeds."""
        loss = float(self.run_steps(*self.epoch_plan())) / self.steps_per_epoch
        self.epoch += 1
        code = self.modules[0].code
        if code is not None and not math.isfinite(loss):
            raise RunError(f"'{code.reference}' has a loss of {loss} in epoch {self.epoch}")
        return loss

    def epoch_plan(self) -> tuple[list[Picks], list[list[float]] | Tensor]:
        """Batches and learning rates of the next epoch, on the device where the steps read them."""
        sizes = [len(data) for data in self.train]
        batches = _epoch_batches(
            sizes, self.per_epoch, self.protocol.batch, self.seeds, self.epoch, self.device
        )
        rates = self.epoch_rates()
        if self.rates is None:
            return batches, rates
        return batches, torch.tensor(rates, dtype=self.rates.dtype).to(self.device)

    def run_steps(self, batches: list[Picks], rates: list[list[float]] | Tensor) -> Tensor:
        """Run the steps of a plan; returns the sum over steps of their mean loss.

        Does not wait for a GPU except to capture: the next step is launched while one runs.
        """
        total = torch.zeros((), device=self.device)
        for module in self.modules:
            module.train()
        for number, (row, batch) in enumerate(zip(rates, batches, strict=True)):
            self._set_rates(row)
            for i in range(len(self.optimisers)):
                picks = batch.picks if self.together else batch.picks[i]
                step = partial(self._step, i, batch.group)
                count = self.epoch * self.steps_per_epoch + number
                with self.modules[i].stepping(self.seeds[i], count):
                    if self.graphs is None:
                        total += step(picks)
                    else:
                        total += self.graphs(step, picks, of=(i, batch.group))
        return total / len(self.seeds)

    def _set_rates(self, row: list[float] | Tensor) -> None:
        if self.rates is not None:
            self.rates.copy_(torch.as_tensor(row))
            return
        for group, rate in zip(self._groups, row, strict=True):
            group["lr"] = rate

    def _step(self, i: int, group: int, picks: Tensor) -> Tensor:
        """Update one seed, or all that are stacked, on networks of one size.

        Args:
            i: place of the seed and its optimiser.
            group: index of the data set.
            picks: rows, ``[batch]``, or ``[seeds, batch]`` of stacked seeds.

        Returns:
            The loss, of stacked seeds the sum of theirs.
        """
        picks = picks.contiguous()
        optimiser, module = self.optimisers[i], self.modules[i]
        optimiser.zero_grad(set_to_none=True)
        target = self.train[group].accuracy[picks]
        network = self.inputs[i][0][group][picks]
        if self.together:
            logits = self._stacked_logits(network, shared=False)
            # A sum over seeds: each seed's gradient is that of its own mean.
            loss = binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1).sum()
        else:
            loss = module.loss(module.logits(network), target)
        loss.backward()
        if self.protocol.clip:
            parameters = [p for each in optimiser.param_groups for p in each["params"]]
            clip_grad_norm_(parameters, self.protocol.clip)
        optimiser.step()
        return loss.detach()

    def _stacked_logits(self, network: Batch, shared: bool) -> Tensor:
        base = self.modules[0]

        def logits(state: dict[str, Tensor], buffers: dict[str, Tensor], data: Any) -> Tensor:
            networks = replace(network, **data)
            out: Tensor = functional_call(base, (state, buffers), (networks,))
            return out

        with _forward_is_logits(base):
            mapped = vmap(logits, in_dims=(0, 0, None if shared else 0))
            out: Tensor = mapped(self.state, self.buffers, network.tensors)
        return out

    @torch.no_grad()
    def predict(self, group: int) -> Tensor:
        """Predictions of every seed for validation networks of one size, ``[seeds, n]``."""
        if self.together:
            stacked = partial(self._stacked_logits, shared=True)
            logits = self.inputs[0][1][group].in_chunks(stacked)
        else:
            read = zip(self.modules, self.inputs, strict=True)
            for module in self.modules:
                module.eval()
            logits = torch.stack([x[1][group].in_chunks(m.logits) for m, x in read])
            code = self.modules[0].code
            if code is not None and not bool(logits.isfinite().all()):
                found = float(logits[~logits.isfinite()][0])
                raise RunError(
                    f"'{code.reference}' expected finite numbers for the validation networks, "
                    f"found {found} in epoch {self.epoch}"
                )
        pairs = zip(self.modules, logits, strict=True)
        return torch.stack([module.to_accuracy(x) for module, x in pairs]).cpu()

    def select(self) -> list[float]:
        """Measure the validation τ of each seed and keep the state of those that improved."""
        accuracy = torch.cat([data.accuracy for data in self.val]).cpu().numpy()
        predicted = torch.cat([self.predict(group) for group in range(len(self.val))], 1)
        taus = [kendall_tau(accuracy, p.numpy()) for p in predicted]
        for i, tau in enumerate(taus):
            self.plateaus[i].after(tau)
            if tau > self.val_tau[i]:
                self.val_tau[i], self.best_epoch[i] = tau, self.epoch
                for name, value in self._tensors().items():
                    if self.together:
                        self.best[name][i] = value.detach()[i]
                    elif name.startswith(f"{i}."):
                        self.best[name].copy_(value.detach())
        return taus

    def result(self) -> Trained:
        """Return the best module of every seed."""
        for i, module in enumerate(self.modules):
            best = {
                name: (self.best[name][i] if self.together else self.best[f"{i}.{name}"])
                for name, _ in module.named_parameters()
            }
            module.load_state_dict(best, strict=False)
            module.restore_state({k: self.best[f"{i}.{k}"] for k in module.kept_state()})
            module.finish(self.val, self.inputs[i][1])
        updates = self.epoch * self.steps_per_epoch
        return Trained(
            list(self.modules), list(self.best_epoch), list(self.val_tau), self.train, updates
        )

    def save(self, path: Path, identity: str) -> None:
        """Write the training state atomically: parameters, best parameters, Adam, progress."""
        tensors = {f"state.{k}": v.detach() for k, v in self._tensors().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        numbers = {}
        for place, value in self._optimiser_state():
            if isinstance(value, Tensor):
                tensors[place] = value
            elif value is None or isinstance(value, int | float):
                numbers[place] = value
            else:
                raise RunError(f"an optimiser that keeps a {type(value).__name__} cannot be saved")
        progress = {
            "numbers": numbers,
            "identity": identity,
            "started": self.started,
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "val_tau": self.val_tau,
            "plateaus": [asdict(each) for each in self.plateaus],
        }
        write_tensors(path, tensors, {"progress": json.dumps(progress)})

    def _optimiser_state(self) -> Iterator[tuple[str, Any]]:
        """What optimisers keep of each parameter, by place."""
        for number, optimiser in enumerate(self.optimisers):
            for i, entry in optimiser.state_dict()["state"].items():
                for name, value in entry.items():
                    yield f"optimiser.{number}.{i}.{name}", value

    def load(self, path: Path, identity: str) -> None:
        """Resume from what `save` wrote; reject the state of another training."""
        try:
            self._load(path, identity)
        except RunError:
            raise
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            raise RunError(
                f"'{path}' is damaged, choose another --out or remove it ({error})"
            ) from error

    def _load(self, path: Path, identity: str) -> None:
        tensors, metadata = read_tensors(path)
        progress = parse_object(metadata.get("progress", "{}"), str(path), RunError)
        if progress.get("identity") != identity:
            raise RunError(
                f"'{path}' is of another training (other networks, model or protocol); "
                "choose another --out or remove it"
            )
        current = self._tensors()
        if any(f"state.{name}" not in tensors for name in current):
            raise RunError(
                f"'{path}' lays out its parameters otherwise (one seed begun on another kind of "
                "device?); choose another --out or remove it"
            )
        for part, targets in (("state", current), ("best", self.best)):
            for name, target in targets.items():
                _check_same(path, f"{part}.{name}", tensors[f"{part}.{name}"], target)
        with torch.no_grad():
            for name, value in self.state.items():
                value.copy_(tensors[f"state.{name}"])
            for name, value in self.best.items():
                value.copy_(tensors[f"best.{name}"])
        for i, module in enumerate(self.modules):
            module.restore_state({k: tensors[f"state.{i}.{k}"] for k in module.kept_state()})
        stored: dict[str, Any] = {**tensors, **progress["numbers"]}
        for number, optimiser in enumerate(self.optimisers):
            whole = optimiser.state_dict()
            whole["state"] = self._optimiser_entries(path, stored, number)
            optimiser.load_state_dict(whole)
        # `load_state_dict` replaced the tensors that the optimiser reads and graphs captured.
        if self.rates is not None:
            self.hold_rates(self.rates.dtype)
        if self.graphs is not None:
            self.graphs.forget()
        self.epoch, self.started = int(progress["epoch"]), int(progress["started"])
        self.best_epoch = [int(e) for e in progress["best_epoch"]]
        self.val_tau = [float(t) for t in progress["val_tau"]]
        self.plateaus = [Plateau(**each) for each in progress["plateaus"]]

    def _optimiser_entries(
        self, path: Path, stored: Mapping[str, Any], number: int
    ) -> dict[int, dict[str, Any]]:
        """What an optimiser kept of each parameter; checked, unless it is of a user's class."""
        entries: dict[int, dict[str, Any]] = {}
        groups = self.optimisers[number].param_groups
        parameters = [p for group in groups for p in group["params"]]
        for key, value in stored.items():
            if key.startswith(f"optimiser.{number}."):
                index, name = key.split(".", 3)[2:]
                if not self.own_optimisers:
                    like = torch.zeros(()) if name == "step" else parameters[int(index)]
                    _check_same(path, key, value, like)
                entries.setdefault(int(index), {})[name] = value
        for place, entry in entries.items():
            if entry.keys() != ADAM and not self.own_optimisers:
                names, found = ", ".join(sorted(ADAM)), ", ".join(sorted(entry))
                raise RunError(
                    f"'{path}' is damaged: the optimiser's state of parameter {place} should be "
                    f"{names}, found {found}"
                )
        return entries


def _check_same(path: Path, name: str, stored: Tensor, like: Tensor) -> None:
    if stored.shape != like.shape or stored.dtype != like.dtype:
        raise RunError(f"'{path}' is damaged: '{name}' is not as it was saved")


def _as_read(module: Pretrained, parts: Parts) -> Parts:
    """Networks as a module trains on them, with what all seeds read of them."""
    if module.every_checkpoint:
        parts = replace(parts, train=parts.all_train, more=None)
    return replace(parts, train=prepared(module, parts.train), val=prepared(module, parts.val))


@contextmanager
def _forward_is_logits(module: nn.Module) -> Iterator[None]:
    """Context in which calling a module gives its logits, for `functional_call`."""
    module.forward = module.logits  # type: ignore[assignment]
    try:
        yield
    finally:
        del module.forward


def _epoch_batches(
    sizes: Sequence[int],
    counts: Sequence[int],
    batch: int,
    seeds: Sequence[int],
    epoch: int,
    device: torch.device,
) -> list[Picks]:
    """Draw the batches of one epoch.

    The networks of a seed are drawn from the seed alone, the order of the sizes from the epoch
    alone: all seeds take the same size in a step, which makes it one CUDA graph, and none depends
    on the other seeds.

    Args:
        sizes: number of networks of each size.
        counts: how many of them the epoch takes.
        batch: maximal batch size.
        seeds: which.
        epoch: counted from 0.
        device: of the picks.
    """
    by_seed = [seed_orders(sizes, counts, seed, epoch, device) for seed in seeds]
    waiting = [
        iter(torch.stack([orders[group] for orders in by_seed]).split(batch, 1))
        for group in range(len(sizes))
    ]
    turns = torch.tensor([g for g, n in enumerate(counts) for _ in range(_num_batches(n, batch))])
    shuffled = torch.randperm(len(turns), generator=torch.Generator().manual_seed(epoch))
    return [Picks(group, next(waiting[group])) for group in turns[shuffled].tolist()]


def seed_orders(
    sizes: Sequence[int], counts: Sequence[int], seed: int, epoch: int, device: torch.device
) -> list[Tensor]:
    """Rows of each size that one epoch of one seed takes, without repetition where possible.

    Drawn on a GPU if the networks are there.
    """
    where = device if device.type == "cuda" else torch.device("cpu")
    source = torch.Generator(where).manual_seed((seed + 1) * 1_000_003 + epoch)
    orders = []
    for n, count in zip(sizes, counts, strict=True):
        rounds = [
            torch.randperm(n, generator=source, device=where) for _ in range(_num_batches(count, n))
        ]
        orders.append(torch.cat(rounds)[:count].to(device))
    return orders


def _num_batches(count: int, batch: int) -> int:
    return -(-count // batch)


def train_seeds(
    build: Callable[[], Pretrained],
    networks: Parts | SizeGroups,
    protocol: Protocol,
    seeds: list[int],
    execution: Execution | None = None,
) -> Trained:
    """Train every seed and return each at its best epoch by validation τ.

    Args:
        build: makes a fresh module with ``logits(network)``.
        networks: training and validation networks, on the device to use.
        protocol: how.
        seeds: which.
        execution: where the state is kept, and progress.
    """
    execution = execution or Execution()
    trainer = SeedTrainer(build, networks, protocol, seeds, together=execution.together)
    folder, report = execution.folder, execution.report
    state = None if folder is None else folder / STATE_FILE
    log: list[str] = []
    if folder is not None and state is not None and state.is_file():
        trainer.load(state, execution.identity)
        lines = read_log(folder / LOG_FILE) if (folder / LOG_FILE).is_file() else []
        log = [json_text(line) for line in lines if line["epoch"] <= trainer.epoch]
    saved = time.monotonic()
    for seed in trainer.start():
        if report is not None and trainer.modules[0].start_note:
            report({"note": f"seed {seed} {trainer.modules[0].start_note}"})
        due = time.monotonic() - saved >= execution.save_every
        if state is not None and trainer.started and due:
            trainer.save(state, execution.identity)
            saved = time.monotonic()
    while trainer.epoch < protocol.epochs:
        rates = trainer.epoch_rates()[-1]
        loss = trainer.train_epoch()
        taus = trainer.select()
        epoch = trainer.epoch
        every = len(rates) // len(trainer.optimisers)  # rates of an optimiser, the lr first
        for i, (seed, tau) in enumerate(zip(seeds, taus, strict=True)):
            rate = rates[0 if trainer.together else i * every]
            line = {"seed": seed, "epoch": epoch, "loss": loss, "val_tau": tau, "lr": rate}
            log.append(json_text(line))
        if report is not None:
            mean = sum(taus) / len(taus)
            report({"epoch": epoch, "epochs": protocol.epochs, "loss": loss, "val_tau": mean})
        last = epoch == protocol.epochs
        due = time.monotonic() - saved >= execution.save_every
        if folder is not None and state is not None and (last or due):
            write_text(folder / LOG_FILE, "\n".join(log) + "\n")
            if not last:
                trainer.save(state, execution.identity)
                saved = time.monotonic()
    return trainer.result()
