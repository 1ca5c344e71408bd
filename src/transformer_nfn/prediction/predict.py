"""Prediction of the accuracy of networks by a trained run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import OpenOptions
from transformer_nfn.io.location import Location
from transformer_nfn.models import Batch, RowLayout
from transformer_nfn.models.batch import rows_of
from transformer_nfn.models.predictor import ARRAYS, BUILT, ZOO_TEXTS, Predictor
from transformer_nfn.networks import Network, resolve_networks, zoo_rows
from transformer_nfn.notebook import bound
from transformer_nfn.prediction.checkpoint_reader import open_checkpoint, read_named
from transformer_nfn.prediction.data import Dataset, check_finite
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.guard.own import OwnGuard, invariants_of
from transformer_nfn.prediction.metrics import LEVEL
from transformer_nfn.prediction.predictors import (
    class_folders,
    class_probabilities,
    load_predictors,
    prepared,
    seed_predictions,
)
from transformer_nfn.prediction.recipe_shift import RecipeShift
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.target import ACCURACY_COLUMN, Target
from transformer_nfn.prediction.training_set import TrainingSetDistance
from transformer_nfn.prediction.uncertainty import TrainedSizes
from transformer_nfn.zoo import NetworkSizes, Zoo
from transformer_nfn.zoo.network_files import check_blocks, check_positions
from transformer_nfn.zoo.store.arrays import array_layout

BATCH = 512
"""Networks in memory at once: a zoo may have tens of thousands."""
OUTLIER_TEXT = (
    "unlike any network of the training set ({} times the usual distance): its interval is the "
    "whole range of the target"
)
GUARD_TEXT = (
    "its outputs, or how its tensors fit each other, are unlike those of healthy networks "
    "({} times the limit): the prediction may be far off and its interval has no known coverage"
)
OWN_GUARD_TEXT = (
    "its weights are more like those of damaged copies than of healthy networks ({} times the "
    "limit): the prediction may be far off, and its interval is the whole range of the target"
)
LARGEST_WEIGHT = 1e6
"""Of a network of a built zoo: no sum or square of up to four such weights in a row overflows."""
LARGE_CORRECTION = 0.1
"""Correction by a guard that is explained to the user."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one checkpoint.

    Attributes:
        name: of the checkpoint.
        value: predicted, the mean over the run's seeds.
        low: lower end of the prediction interval; None for classes, see `labels`.
        high: its upper end.
        spread: standard deviation over the seeds; None of one seed.
        novelty: distance to the training set or, with a guard of a built zoo, the outlier score;
            above 1 is an outlier.
        warning: a sentence if the network looks damaged or is of a size outside the training set,
            else None.
        left_out: tensors of the file that were not read, because networks of the zoo lack them.
        note: about them, and of a network unlike the training set that its interval is the whole
            range of the target; else None.
        recorded: metadata of a zoo's network: run, epoch, hyperparameters and measured test
            accuracy; None for files.
        guarded: whether a guard against damaged networks has assessed it.
        by_weights: the predictor's value before correction by a guard.
        coverage: nominal coverage of the interval; None for sizes outside the training set, for
            networks that the guard of a built zoo warns of, and for outliers if the target is a
            number without bounds.
        target: what is predicted. ``value``, ``low``, ``high`` and ``spread`` are in its unit
            (``spread`` in decades where the number is learned as its logarithm); of a class
            ``value`` and ``spread`` are about the probability of `label`.
        label: the most probable class, None unless classes are predicted.
        labels: classes that contain the true one with the nominal coverage.
        probabilities: of every class.
        mapping: of a file of a user's own modules, where each tensor stands in it, by canonical
            name; None for others.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    spread: float | None
    novelty: float
    warning: str | None
    left_out: tuple[str, ...] = ()
    note: str | None = None
    recorded: Mapping[str, Any] | None = None
    guarded: bool = False
    by_weights: float | None = None
    coverage: float | None = None
    target: str = ACCURACY_COLUMN
    label: str | None = None
    labels: tuple[str, ...] = ()
    probabilities: Mapping[str, float] | None = None
    mapping: Mapping[str, str] | None = None

    @property
    def explanation(self) -> str | None:
        """One sentence if a guard lowered the predictor's value considerably, else None."""
        if self.by_weights is None or self.by_weights - self.value <= LARGE_CORRECTION:
            return None
        return (
            f"by its weights alone it would have {self.by_weights:.1%}, but it answers inputs "
            "that healthy networks agree on as one that has less"
        )


@dataclass(frozen=True)
class LoadedNetwork:
    """A network that the predictors of a run can read.

    Attributes:
        sizes: of the network; None for one of any family.
        network: as the predictors read it, a batch of one.
        left_out: tensors of the file that were not read.
        mapping: see `Prediction`.
    """

    sizes: NetworkSizes | None
    network: Batch
    left_out: tuple[str, ...] = ()
    mapping: Mapping[str, str] | None = None

    @property
    def note(self) -> str | None:
        """One sentence about the tensors that were not read; None if all were."""
        if not self.left_out:
            return None
        names = ", ".join(f"'{name}'" for name in self.left_out[:3])
        more = ", …" if len(self.left_out) > 3 else ""
        many = len(self.left_out) > 1
        return (
            f"{len(self.left_out)} {'tensors are' if many else 'tensor is'} left out ({names}"
            f"{more}), which the zoo's networks do not have: this is the prediction for the "
            f"network without {'them' if many else 'it'}"
        )


@dataclass(frozen=True)
class Assessed:
    """Predictions for networks of one size, ``[n]`` each, as `Target.measured`.

    Attributes:
        each: by the weights alone, of each seed, ``[seeds, n]``; of classes the probability of the
            most probable one.
        mean: over the seeds, unless a guard corrected it.
        low: lower end of the interval.
        high: its upper end.
        novelty: distance to the training set, or the outlier score of a guard of a built zoo.
        score: outlier score of a guard; above 1 is a warning.
        probabilities: of each class by each seed, ``[seeds, classes, n]``.
    """

    each: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor
    novelty: Tensor
    score: Tensor
    probabilities: np.ndarray | None = None


@dataclass(frozen=True)
class TrainedRun:
    """A run opened for prediction; its neural predictors are on ``device``.

    Attributes:
        outputs: a predictor for each seed; for classes so many of each class.
        sizes: of the training networks, and the target.
        distance: to the training networks.
        guard: against damaged networks, if the run has one.
        own_guard: the same for checkpoints of any family.
        shift: interval widths for recipes outside the training set.
        families: of the training networks, if these were checkpoints of any family.
        layout: names and shapes of their tensors, if they were arrays.
        kind: of the zoo of the training networks, one of `models.predictor.ZOOS`.
        model: name of the predictors.
    """

    outputs: list[list[Predictor]]
    sizes: TrainedSizes
    distance: TrainingSetDistance
    guard: Guard | None
    own_guard: OwnGuard | None
    shift: RecipeShift
    device: str = "cpu"
    families: tuple[str, ...] = ()
    layout: RowLayout | None = None
    kind: str = BUILT
    model: str = ""

    @staticmethod
    def open(
        run: Path, device: str = "cpu", *, trust: bool = False, model: str | None = None
    ) -> TrainedRun:
        """Load the predictors of a finished run and what assesses their inputs."""
        record = RunRecord.read(run)
        record.check_finished(run)
        sizes = TrainedSizes.of(record)
        folders = class_folders(run, sizes.target) or [run]
        return TrainedRun(
            [
                [p.to(device) for p in load_predictors(folder, record, trust=trust, model=model)]
                for folder in folders
            ],
            sizes,
            TrainingSetDistance.load(folders[0]),
            Guard.load(run),
            OwnGuard.load(run),
            RecipeShift(**record.summary["shift"]),
            device,
            tuple(record.zoo.get("families", ())),
            array_layout(record.zoo["layout"]) if record.kind == ARRAYS else None,
            record.kind,
            record.model,
        )

    @property
    def target(self) -> Target:
        """What is predicted."""
        return self.sizes.target

    @property
    def predictors(self) -> list[Predictor]:
        """A predictor for each seed, of the first class."""
        return self.outputs[0]

    def guard_for(self, sizes: NetworkSizes | None) -> Guard | None:
        """The guard, if it was fitted to networks of these sizes."""
        return self.guard if sizes is not None and sizes == self.sizes.first else None

    def assess(self, data: Dataset, sizes: NetworkSizes | None, names: Sequence[str]) -> Assessed:
        """Predict networks of one size; reject one whose numbers overflow, by its name."""
        if self.layout is not None:  # an array may hold the same tensors in another order
            rows = self.layout.pack(data.network.views)
            data = replace(data, network=Batch.of_rows(rows, self.layout))
        for tensor, w in ({} if self.families else data.network.views).items():
            large = rows_of(w.abs()).amax(1) > LARGEST_WEIGHT
            if bool(large.any()):
                raise RunError(
                    f"'{names[int(large.nonzero()[0])]}': '{tensor}' holds values beyond "
                    f"{LARGEST_WEIGHT:g}, with which the network overflows single precision"
                )
        data = prepared(self.predictors[0], data)
        probabilities = None
        if self.target.kind == "class":
            probabilities = class_probabilities(self.outputs, data)
            best = probabilities.mean(0).argmax(0)
            values = probabilities[:, best, np.arange(len(data))]
        else:
            values = self.target.decode(seed_predictions(self.predictors, data).numpy())
        each = torch.from_numpy(values)
        guard = self.guard_for(sizes)
        if guard is None or sizes is None:
            found = Assessed(each, each.mean(0), *self._interval(data, sizes, each.mean(0)))
        else:
            judged = guard.assess(data, sizes, each.mean(0))
            score = judged.outlier_score
            found = Assessed(each, judged.accuracy, judged.low, judged.high, score, score)
        units = [self.target.in_unit(x) for x in (found.mean, found.low, found.high)]
        finite = torch.stack([*each, *units, found.novelty, found.score]).isfinite().all(0)
        if not bool(finite.all()):
            name = names[int((~finite).nonzero()[0])]
            raise RunError(
                f"'{name}' has no prediction: what is computed from its weights is not finite, so "
                "some of them are too large"
            )
        return replace(found, probabilities=probabilities)

    def _interval(
        self, data: Dataset, sizes: NetworkSizes | None, mean: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ends of intervals without `guard`, novelty, and outlier score of `own_guard`, ``[n]``."""
        radius, novelty = self.sizes.interval_radius(sizes), self.distance(data)
        if self.sizes.unseen(sizes):  # `TrainedSizes` has widened these
            low, high = mean - radius, mean + radius
        else:
            low, high = self.shift.interval(mean, radius, novelty)
        score = torch.zeros_like(mean)
        if self.own_guard is not None:
            # Far from the training networks nothing is known of damage.
            found = self.own_guard.outlier_score(invariants_of(data), mean)
            score = torch.where(novelty > 1, 0.0, found)
            low = torch.where(score > 1, mean.clamp(max=self.shift.low), low)
            high = torch.where(score > 1, mean.clamp(min=self.shift.high), high)
        return self.target.clip(low), self.target.clip(high), novelty, score

    def class_threshold(self, novelty: Tensor) -> np.ndarray:
        """Doubt up to which a class counts as possible, ``[n]``; 1 for all classes."""
        doubt = self.sizes.radius * self.shift.factors(novelty)
        return np.asarray(torch.where(novelty > 1, 1.0, doubt))

    def load(
        self, networks: Sequence[Network], options: OpenOptions | None = None
    ) -> list[LoadedNetwork]:
        """Load networks; an error says what the predictors cannot read.

        Args:
            networks: to load.
            options: how to open checkpoints whose files do not state all.
        """
        if self.families:
            return [self._load_checkpoint(network, options) for network in networks]
        if options:
            raise RunError(
                f"{options} is for checkpoints of a known family: the run was trained on "
                f"{ZOO_TEXTS[self.kind]}"
            )
        if self.layout is not None:
            return [load_array(network, self.layout) for network in networks]
        trained, loaded = self.sizes.first, []
        for zoo, group in groupby(networks, key=lambda network: network.zoo):
            if zoo is None or zoo.named:
                loaded += [load_network(network, trained, self.predictors) for network in group]
            else:
                loaded += load_rows_of(zoo, list(group), trained, self.predictors)
        return loaded

    def _load_checkpoint(self, network: Network, options: OpenOptions | None) -> LoadedNetwork:
        predictor = self.predictors[0]
        with open_checkpoint(network, self.families, options) as model:
            found = read_named(model, network.name, predictor)
            family = model.binding.family
            own = not (network.zoo or family.model_types or family.architectures)
            mapping = model.mapping() if own else None
            return LoadedNetwork(None, found, mapping=mapping)


Networks = str | Path | Zoo | Iterable[str | Path]
Report = Callable[[int, int], None]
"""Called with the number of networks that are done, and of all."""


def predict(
    run: Path | str,
    networks: Networks,
    *,
    device: str = "cpu",
    batch: int = BATCH,
    report: Report | None = None,
    options: OpenOptions | None = None,
    trust: bool = False,
    model: str | None = None,
) -> list[Prediction]:
    """Predict the accuracy of networks, or the target of the run, from their weights.

    Args:
        run: a run folder that keeps its predictors, or its name.
        networks: an open zoo, or one or several references to networks, see
            `transformer_nfn.networks.resolve_networks`.
        device: ``cpu`` or ``cuda``.
        batch: networks in memory at once.
        report: called after every batch.
        options: how to open checkpoints whose files do not state all.
        trust: whether a user's class may be imported, if its code is what the run recorded.
        model: a user's class that is taken whatever its code is.
    """
    folder = Location.of(run).folder("predictor")
    trained = TrainedRun.open(folder, device, trust=trust, model=model)
    if isinstance(networks, Zoo):
        resolved = zoo_rows(networks)
    else:
        resolved = resolve_networks([networks] if isinstance(networks, str | Path) else networks)
    predictions: list[Prediction] = []
    for start in range(0, len(resolved), batch):
        predictions += _predict_batch(trained, resolved[start : start + batch], options)
        if report is not None:
            report(len(predictions), len(resolved))
    return predictions


def _predict_batch(
    run: TrainedRun, networks: Sequence[Network], options: OpenOptions | None
) -> list[Prediction]:
    """Predictions in the order of the networks; those of one size are evaluated together."""
    loaded = run.load(networks, options)
    places: dict[NetworkSizes | None, list[int]] = {}
    for i, network in enumerate(loaded):
        places.setdefault(network.sizes, []).append(i)
    out: dict[int, Prediction] = {}
    for sizes, indices in places.items():
        data = as_dataset(sizes, [loaded[i] for i in indices]).to(run.device)
        found = run.assess(data, sizes, [networks[i].name for i in indices])
        spread = found.each.std(0) if len(found.each) > 1 else None
        size_warning, guard = run.sizes.warning(sizes), run.guard_for(sizes)
        value, low, high, by_weights = (
            run.target.in_unit(x).tolist()
            for x in (found.mean, found.low, found.high, found.each.mean(0))
        )
        for at, i in enumerate(indices):
            novelty, score = float(found.novelty[at]), float(found.score[at])
            notes, warnings = [loaded[i].note], [size_warning]
            if guard is None and size_warning is None and novelty > 1:
                notes.append(OUTLIER_TEXT.format(bound(novelty, up=True)))
            if score > 1:
                text = OWN_GUARD_TEXT if guard is None else GUARD_TEXT
                warnings.append(text.format(bound(score, up=True)))
            # The whole range holds what is within it; guards of built zoos give less than that.
            unbounded = guard is not None or run.target.kind == "number"
            outlier = score > 1 or novelty > 1
            out[i] = Prediction(
                name=networks[i].name,
                value=value[at],
                low=None if run.target.classes else low[at],
                high=None if run.target.classes else high[at],
                spread=None if spread is None else float(spread[at]),
                novelty=novelty,
                warning=_joined(warnings),
                left_out=loaded[i].left_out,
                note=_joined(notes),
                recorded=networks[i].recorded,
                guarded=guard is not None or run.own_guard is not None,
                by_weights=by_weights[at],
                coverage=None if size_warning or (outlier and unbounded) else LEVEL,
                target=run.target.column,
                mapping=loaded[i].mapping,
                **_class_fields(run, found, at),
            )
    return [out[i] for i in range(len(networks))]


def _class_fields(run: TrainedRun, found: Assessed, at: int) -> dict[str, Any]:
    """Fields of the `Prediction` for one network that are about classes."""
    if found.probabilities is None:
        return {}
    probabilities = found.probabilities.mean(0)[:, at]
    pairs = dict(zip(run.target.classes, probabilities.tolist(), strict=True))
    doubt = run.class_threshold(found.novelty)[at]
    label = run.target.classes[int(probabilities.argmax())]
    likely = tuple(name for name, p in pairs.items() if 1 - p <= doubt)
    return {"label": label, "labels": likely or (label,), "probabilities": pairs}


def _joined(sentences: Sequence[str | None]) -> str | None:
    """Sentences in one, None if there are none."""
    return "; ".join(sentence for sentence in sentences if sentence is not None) or None


def as_dataset(sizes: NetworkSizes | None, networks: Sequence[LoadedNetwork]) -> Dataset:
    """Stack networks of one size, or of any family, as a data set without accuracies."""
    accuracy, columns = torch.zeros(len(networks)), {"row": np.arange(len(networks))}
    batch = Batch.join([each.network for each in networks])
    if sizes is None:
        return Dataset(None, batch, accuracy, columns)
    return Dataset(sizes.block_space, batch, accuracy, columns, sizes.tokens)


def check_readable(
    where: str, sizes: NetworkSizes, trained: NetworkSizes, predictors: Sequence[Predictor]
) -> None:
    """Raise `RunError` unless every predictor reads networks of these sizes.

    Args:
        where: name of the network or zoo in the error.
        sizes: of it.
        trained: of the training networks.
        predictors: of the run.
    """
    for predictor in predictors:
        misfit = predictor.misfit(sizes, trained)
        if misfit is not None:
            raise RunError(f"'{where}' is of another architecture: {misfit}")


def load_rows_of(
    zoo: Zoo, networks: Sequence[Network], trained: NetworkSizes, predictors: Sequence[Predictor]
) -> list[LoadedNetwork]:
    """`load_network` of rows of one zoo, read together."""
    sizes = replace(zoo.sizes, tokens=trained.tokens)
    check_readable(networks[0].name, sizes, trained, predictors)
    stored = zoo.batch([network.row for network in networks])
    batch = check_finite(stored, [network.name for network in networks])
    return [LoadedNetwork(sizes, one) for one in batch.chunks(1)]


def check_layout(where: str, shapes: Mapping[str, Sequence[int]], layout: RowLayout) -> None:
    """Refuse tensors that are not those of the training networks, by name and shape."""
    for name, shape in layout.shapes.items():
        found = None if name not in shapes else list(shapes[name])
        if found != list(shape):
            raise RunError(
                f"'{where}': tensor '{name}' expected {list(shape)} as in the training networks, "
                f"found {'none' if found is None else found}"
            )
    if other := [name for name in shapes if name not in layout.shapes]:
        raise RunError(f"'{where}' holds a tensor '{other[0]}', which the training networks lack")


def load_array(network: Network, layout: RowLayout) -> LoadedNetwork:
    """Load a row of a zoo of arrays, or a file with tensors of the same names and shapes."""
    if network.zoo is not None and network.zoo.layout is not None:
        check_layout(network.name, network.zoo.layout.shapes, layout)
        batch = network.zoo.batch([network.row])
    else:
        with network.open_file() as opened:
            check_layout(network.name, {name: opened.info(name).shape for name in opened}, layout)
            batch = Batch.of({name: opened[name][None].float() for name in layout.shapes})
    return LoadedNetwork(None, check_finite(batch, [network.name]))


def load_network(
    network: Network, trained: NetworkSizes, predictors: Sequence[Predictor]
) -> LoadedNetwork:
    """Load a network; an error says what the predictors cannot read.

    Args:
        network: with the tensor names of the zoo's networks or of the authors' state dicts.
        trained: sizes of the training networks.
        predictors: of the run.
    """
    where = network.name
    with network.as_zoo_network(trained) as opened:
        sizes, unread = opened.sizes, opened.unread
        if any(name.endswith("self_attn.in_proj_weight") for name in unread):
            raise RunError(
                f"'{where}' is of another architecture: an nn.TransformerEncoder has residuals and "
                "gains, the networks of a built zoo have none; `tnfn zoo import` makes a zoo of "
                "yours to train on"
            )
        check_readable(where, sizes, trained, predictors)
        check_blocks(where, unread, sizes)
        one = {name: tensor.unsqueeze(0).float() for name, tensor in opened.read().items()}
        check_positions(where, opened.tensors, sizes)
    return LoadedNetwork(sizes, check_finite(Batch.of(one), [where]), tuple(unread))
