"""Every number of a report and what its charts say, counted again from the run folders.

The package says which runs are compared and in which order, and reads zoos. All arithmetic is here:
each number is worked out by its definition.
"""

import json
import math
import shlex
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from transformer_nfn.io.location import Location
from transformer_nfn.models.predictor import model_name
from transformer_nfn.paper.gather import Run, Study, ZooStudy, gather
from transformer_nfn.paper.table_text import curve_lines
from transformer_nfn.zoo import Zoo

PARTS = ("train", "val", "test")
SETTINGS = ("optimizer", "learning_rate", "l2", "init_std", "dropout", "train_fraction")
SPELT = {"l2": "L2"}
MOST_DRAWN = 1000
NO_VALUE = "–"


def recount(runs: list, zoos: list) -> dict[str, Any]:
    """Numbers by the key that the page marks each with, and the charts in the order of the zoos.

    A chart has its ``kind``, ``zoo``, the numbers of its description and its ``marks``, each with a
    ``title`` and ``numbers``; that of predictions has ``panels`` of these, whose marks also have
    ``words`` that are said of them.
    """
    study = gather([Location.of(folder).folder("predictor") for folder in runs])
    named = [(str(zoo), Zoo.open(zoo)) for zoo in zoos]
    held = [Held(zoo, named) for zoo in study.zoos]
    numbers = _of_runs(study) | _of_tables(study)
    charts: list[dict[str, Any]] = []
    for z, each in enumerate(held):
        found = _of_zoo(each)
        numbers |= {f"z{z}.{key}": value for key, value in found.items()}
        charts += [{"zoo": z, **chart} for chart in _charts(each, study)]
    return {"numbers": numbers, "charts": charts}


def known(values):
    return [value for value in values if value is not None]


def number(value):
    """A finite number; None for anything else."""
    of_numbers = isinstance(value, int | float) and not isinstance(value, bool)
    return value if of_numbers and math.isfinite(value) else None


def mean(values):
    return math.fsum(values) / len(values)


def average(values):
    """The mean in a list, which is empty where a value is missing."""
    return [] if not values or None in values else [mean(values)]


def with_error(values):
    """The mean, and of several values its standard error."""
    if len(values) < 2 or None in values:
        return average(values)
    middle, count = mean(values), len(values)
    squares = math.fsum((value - middle) ** 2 for value in values)
    return [middle, math.sqrt(squares / (count - 1) / count)]


def percents(values):
    return [100 * value for value in known(values)]


def share(rows, test):
    return 100 * sum(map(test, rows)) / len(rows)


def kendall(a, b):
    """Kendall's τ-b by its definition, pair by pair; 0 where an order says nothing."""
    x, y = (np.sign(np.subtract.outer(values, values)) for values in (np.array(a), np.array(b)))
    untied = (x * x).sum() * (y * y).sum()
    return float((x * y).sum() / math.sqrt(untied)) if untied else 0.0


def r_squared(truth, said):
    middle = mean(truth)
    off = math.fsum((t - s) ** 2 for t, s in zip(truth, said, strict=True))
    return 1 - off / math.fsum((t - middle) ** 2 for t in truth)


def absolute_error(truth, said):
    return mean([abs(t - s) for t, s in zip(truth, said, strict=True)])


def millionths(accuracy):
    """An accuracy as an integer; zoos have it as float32."""
    return round(float(np.float32(accuracy)) * 1e6)


def rounded(value):
    return None if number(value) is None else round(value * 1e6) / 1e6


@dataclass
class Network:
    """A held-out network; ``place`` is its row in the zoo, None where runs disagree about it."""

    accuracy: int
    run: Any
    place: str | None
    settings: dict[str, Any]
    name: str = ""

    @property
    def truth(self) -> float:
        return self.accuracy / 1e6


class Prediction(NamedTuple):
    """What one seed, or the mean of several, says of a network; ``raw`` is not rounded."""

    n: int
    truth: float
    said: float
    low: float | None
    high: float | None
    raw: tuple[float, float] | None = None

    @property
    def bounded(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def inside(self) -> bool:
        return self.low <= self.truth <= self.high


@dataclass
class Model:
    """A compared run; ``tests`` are the predictions of each seed that kept them, by seed."""

    name: str
    record: dict[str, Any]
    log: list[dict[str, Any]]
    tests: dict[int, list[Prediction]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[dict[str, Any]]:
        return self.record["seeds"]

    @property
    def tested(self) -> list[int]:
        return [seed["seed"] for seed in self.seeds if seed["seed"] in self.tests]

    @property
    def rows(self) -> list[Prediction]:
        return [row for seed in self.tested for row in self.tests[seed]]

    @property
    def bounded(self) -> list[Prediction]:
        return [row for row in self.rows if row.bounded]

    @property
    def level(self) -> float | None:
        return number(self.record["summary"].get("level"))

    def scores(self, name: str) -> list[float | None]:
        """``tau``, ``r2`` or ``mae`` of each seed; as recorded where it kept no predictions."""
        measure = {"tau": kendall, "r2": r_squared, "mae": absolute_error}[name]
        return [
            measure(*zip(*(row.raw for row in self.tests[seed["seed"]]), strict=True))
            if seed["seed"] in self.tests
            else number(seed.get(name))
            for seed in self.seeds
        ]

    def inside(self) -> list[float]:
        return [share(self.bounded, lambda row: row.inside)] if self.bounded else []

    def means(self) -> list[Prediction]:
        """For each network the mean over the seeds that tested it."""
        by_network: dict[int, list[Prediction]] = {}
        for row in self.rows:
            by_network.setdefault(row.n, []).append(row)
        found = []
        for n, rows in sorted(by_network.items()):
            columns = zip(*(row[2:5] for row in rows), strict=True)
            said, low, high = (None if None in column else mean(column) for column in columns)
            found.append(Prediction(n, rows[0].truth, said, low, high))
        return found

    def together(self) -> list[float]:
        """τ of the mean over seeds; as recorded where they did not test the same networks."""
        if len(self.seeds) < 2:
            return []
        parts = [self.tests.get(seed["seed"], []) for seed in self.seeds]
        if not parts[0] or len({tuple(row.n for row in part) for part in parts}) > 1:
            return known([number(self.record["summary"].get("tau_together"))])
        said = [mean([row.raw[1] for row in rows]) for rows in zip(*parts, strict=True)]
        return [kendall([row.raw[0] for row in parts[0]], said)]


class Held:
    """The held-out networks of a zoo, and what its compared runs predict, best first."""

    def __init__(self, zoo: ZooStudy, named: list[tuple[str, Any]]) -> None:
        self.zoo = zoo
        self.records = [_record(run) for run in zoo.runs]
        self.by_row = any("families" in record["zoo"] for record in self.records)
        self.networks: list[Network] = []
        self.index: dict[tuple[Any, int], int] = {}
        self.validation: set[int] = set()
        self.models = [self._read(run) for run in zoo.finished]
        self.example = _record((zoo.finished or zoo.main or zoo.runs)[0])
        about = self.example["zoo"]
        self.reference = about.get("name") or about.get("task") or "ZOO"
        self.everything: list[int] | None = None
        for text, opened in named:
            self._name(text, opened)
        for network in self.networks:
            network.name = _name(self.reference, network)
        self.test = sorted({row.n for model in self.models for row in model.rows})
        self.settings = [
            name for name in SETTINGS
            if known(network.settings[name] for network in self.networks)
        ]  # fmt: skip

    @property
    def tested(self) -> list[Model]:
        return [model for model in self.models if model.rows]

    @property
    def others(self) -> list[float]:
        """Accuracies outside the test parts: of all networks, or of the validation parts."""
        if self.everything is None:
            return [self.networks[n].truth for n in sorted(self.validation)]
        left = list(self.everything)
        for n in self.test:
            left.remove(self.networks[n].accuracy)
        return [accuracy / 1e6 for accuracy in left]

    def _read(self, run: Run) -> Model:
        log = run.folder / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        model = Model(run.name, _record(run), lines)
        path = run.folder / "predictions.parquet"
        rows = pq.read_table(path).to_pylist() if path.exists() else []
        rows = [row for row in rows if number(row["accuracy"]) is not None]
        self.validation |= {self._add(row) for row in rows if row["split"] == "val"}
        for row in rows:
            if row["split"] != "test" or number(row["predicted"]) is None:
                continue
            n = self._add(row)
            values = (rounded(row.get(name)) for name in ("predicted", "low", "high"))
            raw = (row["accuracy"], row["predicted"])
            tested = Prediction(n, self.networks[n].truth, *values, raw)
            model.tests.setdefault(row["seed"], []).append(tested)
        return model

    def _add(self, row: dict[str, Any]) -> int:
        """Index of a network, which is known by its training, or its row, and accuracy."""
        kind, run = row.get("kind"), row.get("run")
        place = f"#{row['row']}" if kind is None else f"/{kind}#{row['row']}"
        if kind is not None and run is not None:
            run = f"{kind}/{run}"
        accuracy = millionths(row["accuracy"])
        key = (place if run is None or self.by_row else str(run), accuracy)
        if key not in self.index:
            self.index[key] = len(self.networks)
            settings = {name: _value(row.get(name)) for name in SETTINGS}
            self.networks.append(Network(accuracy, run, place, settings))
        network = self.networks[self.index[key]]
        if network.place != place:
            network.place = None
        return self.index[key]

    def _name(self, text: str, opened: Any) -> None:
        """Rows and accuracies of a zoo that was named, if all networks are in it."""
        if not self.models or self.by_row != opened.named:
            return
        found = _all_networks(opened, self.models[0].record)
        places = {(run, accuracy): place for run, accuracy, place in found}
        if not self.index or self.index.keys() - places.keys():
            return
        self.reference, self.everything = text, [accuracy for _, accuracy, _ in found]
        for key, n in self.index.items():
            self.networks[n].place = places[key]


def _record(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "run.json").read_text())


def _value(value):
    return None if value == "" or (isinstance(value, float) and number(value) is None) else value


def _name(reference: str, network: Network) -> str:
    """As ``tnfn predict`` reads it from a shell."""
    if network.place is None:
        return f"run {network.run}"
    name = reference + network.place
    return name if shlex.quote(reference) == reference else shlex.quote(name)


def _all_networks(opened: Any, record: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Training or row, accuracy and place of each network of a zoo that a run could choose."""
    chosen, column = record["selection"], (record["target"] or {}).get("column", "test_accuracy")
    if opened.named:
        values = np.asarray(opened.targets[column])
        return [(f"#{row}", millionths(value), f"#{row}") for row, value in enumerate(values)]
    found = []
    for kind, zoo in opened.parts.items():
        bound = chosen["min_accuracy"] or None
        if kind in chosen.get("left_out", ()):
            continue
        for row in zoo.select(percent=chosen["percent"], min_accuracy=bound):
            run, value = zoo.table["run"][row], zoo.table[column][row]
            inside = (f"{kind}/{run}", f"/{kind}#{row}") if kind else (str(run), f"#{row}")
            if np.isfinite(value):
                found.append((inside[0], millionths(value), inside[1]))
    return found


def _of_runs(study: Study) -> dict[str, Any]:
    found: dict[str, Any] = {"runs": [len(study.runs)], "folders": [len(study.runs)]}
    for i, run in enumerate(study.runs):
        record = _record(run)
        found[f"run{i}.parts"] = known(record["selection"].get(part) for part in PARTS)
        if record["status"] == "done":
            found[f"run{i}.tau"] = with_error(_taus(record["seeds"]))
    done = {run.name for run in study.runs if _record(run)["status"] == "done"}
    return found | {"models": [len(done)]}


def _taus(seeds):
    return [number(seed.get("tau")) for seed in seeds]


def _of_tables(study: Study) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for t, view in enumerate((*study.tables, *study.curves.values())):
        rows, columns = list(view.rows), list(view.columns)
        taus = {at: _taus(cell.rows) for at, cell in view.ours.items()
                if cell.rows and cell.rows[0]["status"] == "done"}  # fmt: skip
        for (row, column), cell in view.ours.items():
            key = f"t{t}.r{rows.index(row)}.c{columns.index(column)}"
            if view.paper.quantity == "parameters" or column == "parameters":
                found[key] = known([cell.rows[0]["parameters"]])
            elif column == "change":
                # From twice as many updates, or as many where that was not run.
                given = [_mean_or_lead(taus, row, other) for other in columns if other != "change"]
                original, twice, *others = given
                base = original if twice is None else twice
                found[key] = [max((tau - base for tau in known(others)), key=abs)]
            elif row == "gap":
                found[key] = [_mean_or_lead(taus, row, column)]
            elif taus.get((row, column)):
                found[key] = with_error(taus[row, column])
    return found


PAPER_ROWS = ("xgboost", "lightgbm", "random_forest", "mlp", "statnn")


def _mean_or_lead(taus, row, column):
    """The mean of a cell; of the row ``gap`` the lead of Transformer-NFN over the best other."""
    if row != "gap":
        return mean(taus[row, column]) if taus.get((row, column)) else None
    others = [mean(taus[each, column]) for each in PAPER_ROWS if taus.get((each, column))]
    ours = taus.get(("transformer_nfn", column))
    return mean(ours) - max(others) if ours and others else None


def _of_zoo(held: Held) -> dict[str, Any]:
    found = _facts(held)
    models = held.models
    if len(models) > 1:
        found["lede.tau"] = average(models[0].scores("tau"))
    for m, model in enumerate(models):
        found |= {f"m{m}.{key}": value for key, value in _of_model(model).items()}
        found |= _worst(held, m)
    if held.others and held.test:
        truth = [held.networks[n].truth for n in held.test]
        said = [mean(held.others)] * len(truth)
        found["mean.said"], found["mean.networks"] = [100 * said[0]], [len(held.others)]
        found["mean.r2"] = [r_squared(truth, said)]
        found["mean.mae"] = [absolute_error(truth, said)]
    found |= _by_group(held)
    accuracies = _accuracies(held)
    if accuracies:
        found["histogram"] = [len(accuracies)]
    most = max((len(model.means()) for model in held.tested), default=0)
    if most > MOST_DRAWN:
        found["drawn.total"], found["drawn.shown"] = [most], [MOST_DRAWN]
    return found


def _facts(held: Held) -> dict[str, Any]:
    about, chosen = held.example["zoo"], held.example["selection"]
    size = about["networks"] if "families" in about else about.get("runs", about.get("networks"))
    seeds = sorted({str(seed["seed"]) for record in held.records for seed in record["seeds"]})
    found = {
        "facts.parts": known(chosen.get(part) for part in PARTS),
        "facts.compared": [len(held.models)],
        "facts.models": [len({record["model"] for record in held.records})],
        "facts.runs": [len(held.records)],
    }
    if size is not None:
        found["facts.size"] = [size]
    if seeds:
        found["facts.seeds"] = [len(seeds), *map(int, seeds)]
    return found


def _of_model(model: Model) -> dict[str, Any]:
    found = {
        "tau": with_error(model.scores("tau")),
        "together": model.together(),
        "r2": average(model.scores("r2")),
        "mae": average(model.scores("mae")),
        "inside": model.inside(),
        "parameters": known([model.record["num_parameters"]]),
    }
    rows, summary, level = model.bounded, model.record["summary"], model.level
    if not rows:
        return found
    held = {
        "aim": percents([level]),
        "inside": model.inside(),
        "below": [share(rows, lambda row: row.truth < row.low)],
        "above": [share(rows, lambda row: row.truth > row.high)],
        "width": [100 * mean([row.high - row.low for row in rows])],
        "reach": percents([number(summary.get("radius"))]),
        "recorded": percents([number(summary.get("coverage"))]),
    }
    found |= {f"calibration.{key}": value for key, value in held.items()}
    # Wilson's interval: the shares p from which what was seen is 1.96 standard errors away.
    n, p = len({row.n for row in rows}), model.inside()[0] / 100
    a, b, c = n + 1.96**2, 2 * n * p + 1.96**2, n * p**2
    ends = [(b + sign * math.sqrt(b**2 - 4 * a * c)) / (2 * a) for sign in (-1, 1)]
    if level is not None and ends[1] < level:
        found |= {
            "short.aim": [100 * level], "short.inside": model.inside(),
            "short.networks": [n], "short.sampled": percents(ends),
        }  # fmt: skip
    return found


def _worst(held: Held, m: int) -> dict[str, Any]:
    """The networks furthest from the mean prediction of a model; of the best also a sentence."""
    model, found = held.models[m], {}
    worst = sorted(model.means(), key=lambda row: -abs(row.said - row.truth))[:8]
    for k, row in enumerate(worst):
        network = held.networks[row.n]
        cells = {
            "id": network.name,
            "run": NO_VALUE if network.run is None else str(network.run),
            "true": [100 * row.truth],
            "predicted": [100 * row.said],
            "interval": [100 * row.low, 100 * row.high] if row.bounded else [],
            "error": [100 * (row.said - row.truth)],
        }
        for name in held.settings:
            value = network.settings[name]
            cells[name] = value if isinstance(value, str) else known([value])
        found |= {f"m{m}.w{k}.{key}": value for key, value in cells.items()}
    return found


def _error(model, members):
    off = [abs(row.said - row.truth) for row in model.rows if row.n in members]
    return mean(off) if off else None


def _groupings(held: Held) -> list[list[tuple[Any, set[int]]]]:
    """Label and test networks of each group: by optimiser, where it is known, and accuracy."""
    if not held.test:
        return []
    optimizer = {n: held.networks[n].settings["optimizer"] for n in held.test}
    names = sorted({*known(optimizer.values())})
    first = [name for name in ("sgd", "sgdm", "adam", "rmsprop") if name in names]
    names = first + [name for name in names if name not in first]
    optimisers = [(name, {n for n in held.test if optimizer[n] == name}) for name in names]
    values = {n: held.networks[n].accuracy for n in held.test}
    low, high = min(values.values()), max(values.values())
    start, step = 0, 20
    if high - low <= 500_000:
        start = low // 10_000
        step = max(1, math.ceil((high - start * 10_000) / 50_000))
        start = max(0, min(start, 100 - 5 * step))
    bands = []
    for i in range(5):
        a, b = start + step * i, start + step * (i + 1)
        most = b * 10_000 if i < 4 else math.inf
        bands.append(([a, b], {n for n in held.test if a * 10_000 <= values[n] < most}))
    return [optimisers, bands] if optimisers else [bands]


def _by_group(held: Held) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bounded = [model for model in held.tested if model.bounded]
    for g, groups in enumerate(_groupings(held)):
        for c, (label, members) in enumerate(groups):
            for kind in ("error", "inside") if bounded else ("error",):
                found[f"{kind}{g}.label{c}"] = label
                found[f"{kind}{g}.n{c}"] = [len(members)]
            for r, model in enumerate(held.tested):
                error = _error(model, members)
                if error is not None:
                    found[f"error{g}.r{r}.c{c}"] = [error]
            if held.others and members:
                said = mean(held.others)
                off = [abs(held.networks[n].truth - said) for n in members]
                found[f"error{g}.r{len(held.tested)}.c{c}"] = [mean(off)]
            for r, model in enumerate(bounded):
                rows = [row for row in model.bounded if row.n in members]
                if rows:
                    found[f"inside{g}.r{r}.c{c}"] = [share(rows, lambda row: row.inside)]
    return found


def _accuracies(held):
    """Of all networks in millionths."""
    if held.everything is not None:
        return held.everything
    return [network.accuracy for network in held.networks]


def _charts(held: Held, study: Study) -> list[dict[str, Any]]:
    models = [model for model in held.models if average(model.scores("tau"))]
    found = []
    if models:
        found.append(_chart("taus", [len(models)], map(_tau_mark, models)))
    if accuracies := _accuracies(held):
        found.append(_histogram(accuracies))
    if held.tested:
        panels = [_panel(held, model) for model in held.tested]
        found.append({"kind": "scatter", "panels": panels})
    return found + _sizes(held, study) + _curves(held)


def _chart(kind, described, marks):
    return {"kind": kind, "described": described, "marks": list(marks)}


def _mark(title, numbers):
    return {"title": title, "numbers": numbers}


def _tau_mark(model):
    numbers = with_error(model.scores("tau"))
    for seed, tau in zip(model.seeds, model.scores("tau"), strict=True):
        ends = (number(seed.get("tau_low")), number(seed.get("tau_high")))
        numbers += [seed["seed"], tau, *known(ends)]
    return _mark(model.name, numbers)


def _histogram(accuracies):
    """Bands of five percent, a bound in that above it, that have networks."""
    counts = [0] * 20
    for accuracy in accuracies:
        counts[min(19, accuracy // 50_000)] += 1
    marks = [
        _mark(f"{5 * i} to {5 * i + 5} %", [count, 100 * count / len(accuracies)])
        for i, count in enumerate(counts)
        if count
    ]
    return _chart("histogram", [len(accuracies)], marks) | {"bars": [n for n in counts if n]}


def _panel(held: Held, model: Model) -> dict[str, Any]:
    means = model.means()
    total, several = len(means), len(model.tested) > 1
    if total > MOST_DRAWN:
        means = [means[i * (total - 1) // (MOST_DRAWN - 1)] for i in range(MOST_DRAWN)]
    marks = []
    for row in sorted(means, key=lambda row: row.truth):
        network = held.networks[row.n]
        numbers = [100 * row.truth, 100 * row.said]
        numbers += [100 * row.low, 100 * row.high] if row.bounded else []
        if network.run is not None:
            # Of a mixed zoo the name of a run has that of its size in front.
            numbers.append(int(str(network.run).rpartition("/")[2]))
        numbers += known(network.settings[name] for name in SETTINGS if name != "optimizer")
        marks.append(_mark(network.name, numbers) | {"words": _words(network)})
    whose = len(model.tested) if several else model.tested[0]
    panel = _chart("scatter", [len(means), whose], marks)
    return panel | {"name": model.name, "tau": average(model.scores("tau"))}


def _words(network):
    """What else a mark says: the run, the optimiser, and what the known settings are."""
    optimizer = network.settings["optimizer"]
    words = [] if network.run is None else [f"run {network.run}"]
    words += [] if optimizer is None else [f"optimiser {optimizer}"]
    names = [name for name in SETTINGS[1:] if network.settings[name] is not None]
    return words + [f"{SPELT.get(name, name.replace('_', ' '))} " for name in names]


def _sizes(held: Held, study: Study) -> list[dict[str, Any]]:
    """τ by number of training networks."""
    curve = study.curves.get(held.zoo.label)
    lines = held.zoo.by_size() if curve is None else curve_lines(curve)
    marks, sizes = [], set()
    for model, cells in lines.items():
        for cell in cells:
            sizes.add(cell.train)
            marks.append(_mark(model_name(model), [cell.train, *with_error(_taus(cell.rows))]))
    return [_chart("sizes", [len(lines), len(sizes)], marks)] if lines else []


def _curves(held: Held) -> list[dict[str, Any]]:
    """Of each model the means over seeds by epoch, then the epochs that were kept."""
    found = []
    for name in ("val_tau", "loss"):
        marks, lines = [], 0
        for model in held.models:
            by_seed: dict[int, dict[int, Any]] = {}
            for line in model.log:
                by_seed.setdefault(line["seed"], {})[line["epoch"]] = number(line[name])
            here = []
            for epoch in sorted({epoch for values in by_seed.values() for epoch in values}):
                values = known(values.get(epoch) for values in by_seed.values())
                if values:
                    here.append(_mark(model.name, [epoch, mean(values)]))
            kept = {seed["seed"]: seed.get("best_epoch") for seed in model.seeds}
            for seed, values in by_seed.items() if name == "val_tau" else ():
                epoch = kept.get(seed)
                if values.get(epoch) is not None:
                    here.append(_mark(model.name, [seed, epoch, values[epoch]]))
            marks += here
            lines += bool(here)
        if lines:
            found.append(_chart(f"curve-{name}", [lines], marks))
    return found
