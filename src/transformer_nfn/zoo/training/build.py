"""Build a zoo or a mixed zoo: plan, train missing shards, write the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import NetworkSizes, SizeGroup
from transformer_nfn.zoo.store.folder import (
    GROUPS_FILE,
    Folder,
    check_fresh,
    check_outside_zoos,
    claim,
    is_mixed,
    read_groups,
    write_groups,
)
from transformer_nfn.zoo.store.zoo import Zoo
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.local_engine import run_local
from transformer_nfn.zoo.training.plan import BuildOptions, Progress, make_plan
from transformer_nfn.zoo.training.randomness import run_seed

_FILES = {GROUPS_FILE, "checksums.json", "claims"}


def build(out: Path | str, options: BuildOptions, progress: Progress | None = None) -> Zoo:
    """Build a zoo, or continue an interrupted build.

    Args:
        out: the folder; empty, missing, or that of the same build.
        progress: receives reports; None for none.

    >>> from tempfile import mkdtemp
    >>> options = BuildOptions("digits", runs=1, epochs=1, samples=32, workers=1, width=4, depth=1)
    >>> build(mkdtemp(), options).select(percent=100)
    array([0])
    """
    out = Path(out)
    if not (out / "zoo.json").exists():
        check_outside_zoos(out, new=True)
    return _build(out, options, progress)


def _build(out: Path, options: BuildOptions, progress: Progress | None) -> Zoo:
    options = options.resolved()
    _check_path(options, options.group)
    plan = make_plan(out, options)
    if options.engine == "ray":
        from transformer_nfn.zoo.training.ray_engine import run_ray

        run_ray(plan, progress or Progress())
    else:
        run_local(plan, progress or Progress())
    plan.folder.merge()
    return Zoo.open(out)


def _check_path(options: BuildOptions, group: SizeGroup) -> None:
    """Raise early if the chosen step code cannot train these networks."""
    known = KNOWN_TASKS.get(options.task)  # loading an unknown task fails later
    sizes = None if known is None else NetworkSizes.of(known, group)
    describe_path(options.path, options.device, sizes, options.precision)


def build_mixed(
    out: Path | str,
    options: BuildOptions,
    groups: Sequence[SizeGroup],
    progress: Progress | None = None,
) -> Zoo:
    """Build a zoo per size group in subfolders, or continue an interrupted build.

    Args:
        out: the folder; empty, missing, or that of the same build.
        options: of all groups; their ``runs`` are divided among the groups, and each group has a
            seed derived from ``seed``, so that no two share a run.
        groups: different size groups, at least one.
        progress: receives reports; None for none.
    """
    out = Path(out)
    parts = divide(options.resolved(), groups)
    if options.path != "auto":
        for part in parts:
            _check_path(part, part.group)
    _check_folder(out, groups)
    # The first plan validates the options before anything else is written.
    recipe = make_plan(out / parts[0].group.name, parts[0]).recipe
    with claim(out, "create", wait=True):
        if not is_mixed(out):
            write_groups(out, groups, {"task": options.task, "seeds": options.seeds})
    done = sum(_runs_done(out / part.group.name) for part in parts)
    reporter = _GroupProgress(progress or Progress(), [part.group for part in parts])
    reporter.start(options.grid_runs, done, recipe.epochs_trained)
    for part in parts:
        _build(out / part.group.name, part, reporter)
    return Zoo.open(out)


def divide(options: BuildOptions, groups: Sequence[SizeGroup]) -> list[BuildOptions]:
    """The options of each size group: an equal share of the runs (to within one), a seed."""
    if len(set(groups)) != len(groups) or not groups:
        raise ZooError(f"a mixed zoo needs different kinds, found {[g.name for g in groups]}")
    if options.grid_runs < len(groups):
        raise ZooError(
            f"{options.grid_runs} runs cannot be spread over {len(groups)} kinds of network"
        )
    share, more = divmod(options.grid_runs, len(groups))
    return [
        replace(
            options,
            runs=share + (i < more),
            seed=group_seed(options.seed, group),
            **asdict(group),
        )
        for i, group in enumerate(groups)
    ]


def group_seed(seed: int, group: SizeGroup) -> int:
    """The seed of a size group's zoo, 63 bits.

    >>> group_seed(0, SizeGroup(16)) != group_seed(0, SizeGroup(32))
    True
    """
    # Runs are numbered below 2**20, so no run of a plain zoo has this number.
    return run_seed(seed, (group.width << 40) + (group.heads << 30) + (group.depth << 20))


def _runs_done(path: Path) -> int:
    if not (path / "zoo.json").is_file():
        return 0
    folder = Folder.open(path)
    runs = dict(zip(folder.shards, folder.metadata["plan"], strict=True))
    return sum(len(runs[shard]) for shard in folder.finished())


def _check_folder(out: Path, groups: Sequence[SizeGroup]) -> None:
    """Reject a folder that holds anything but this mixed zoo, or lies in a zoo."""
    if (out / "zoo.json").exists():
        raise StoreError(f"'{out}' holds a zoo of one kind: name an empty folder")
    check_outside_zoos(out, new=True)
    names = [group.name for group in groups]
    if is_mixed(out):
        stored = [group.name for group in read_groups(out)[1]]
        if set(stored) != set(names):
            raise StoreError(
                f"'{out}' holds another mixed zoo: kinds {', '.join(stored)}, asked for "
                f"{', '.join(names)}"
            )
    check_fresh(out, _FILES | set(names))


class _GroupProgress(Progress):
    """One progress over all size groups; the beginning of a group is reported as a note."""

    def __init__(self, progress: Progress, groups: Sequence[SizeGroup]) -> None:
        self._progress, self._groups, self._begun = progress, groups, 0

    def start(self, runs: int, done: int, epochs: int) -> None:
        """Report the total over all groups."""
        note = f"{len(self._groups)} kinds of network"
        self._progress.begin(runs, done, (runs - done) * epochs, note)

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """The next group begins."""
        name = self._groups[self._begun].name
        self._begun += 1
        self._progress.note(f"{name} ({self._begun} of {len(self._groups)}): {note}")

    def trained(self, network_epochs: int) -> None:
        """That many networks finished an epoch."""
        self._progress.trained(network_epochs)

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard was written."""
        self._progress.finished(shard, runs, crashed)

    def note(self, text: str) -> None:
        """A message for the user."""
        self._progress.note(text)
