"""Import of networks with a table of their targets: checkpoints of any family, and arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model, OpenOptions, UnknownFamilyError
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.checkpoint import checkpoint_paths
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.io.tensor_files import read_tensors
from transformer_nfn.models.batch import rows_of
from transformer_nfn.zoo.errors import ImportFileError
from transformer_nfn.zoo.store.checkpoints import open_network, plain_name
from transformer_nfn.zoo.store.folder import (
    MODELS_KIND,
    check_fresh,
    check_outside_zoos,
    zoo_kind,
)
from transformer_nfn.zoo.store.zoo import Zoo
from transformer_nfn.zoo.targets import (
    TargetTable,
    Value,
    check_name,
    check_targets,
    read_targets,
)


@dataclass(frozen=True)
class Planned:
    """What an import does with one file.

    Attributes:
        file: relative to the folder of the import.
        family: that it was recognised as; empty if it was not opened.
        present: the zoo holds it already.
        reason: why it cannot be imported; empty if it can.
        targets: of the network.
    """

    file: str
    family: str = ""
    present: bool = False
    reason: str = ""
    targets: Mapping[str, Value] = field(default_factory=dict)

    @property
    def action(self) -> str:
        """``import``, ``present`` or ``skip``."""
        return "skip" if self.reason else "present" if self.present else "import"


def plan_import(
    folder: Path, targets: Path, out: Path, options: OpenOptions | None = None
) -> list[Planned]:
    """What `import_networks` would do with each row of the table and each file without a row.

    Reads every weight that would be imported, and writes nothing.
    """
    if not folder.is_dir():
        raise ImportFileError(f"'{folder}' is not a folder: expected one with the networks")
    zoo = _existing(out)
    table = read_targets(targets)
    options = OpenOptions() if options is None else options
    if options.architecture is not None:
        raise ImportFileError("a zoo holds families of the library, not those of --architecture")
    rows = {} if zoo is None else {name: i for i, name in enumerate(zoo.table["network"])}
    taken: dict[str, str] = {}
    planned = []
    for at, file in enumerate(table.files):
        name = plain_name(file)
        try:
            if name in taken:
                raise ImportFileError(
                    f"{table.place(at)}: '{taken[name]}' has the same name but for its suffix"
                )
            taken[name] = file
            if zoo is not None and name in rows:
                _check_present(zoo, rows[name], folder / file, table.row(at))
                planned.append(Planned(file, zoo.table["family"][rows[name]], present=True))
            else:
                planned.append(_planned(folder, table, at, options, zoo))
        except TransformerNFNError as error:
            planned.append(Planned(file, reason=str(error)))
    listed = {folder / file for file in table.files} | {out}
    for path in sorted(checkpoint_paths(folder)):
        if not listed & {path, *path.parents}:
            file = path.relative_to(folder).as_posix()
            planned.append(Planned(file, reason=f"'{path}' has no row in '{targets}'"))
    return planned


def import_networks(
    folder: Path,
    targets: Path,
    out: Path,
    options: OpenOptions | None = None,
    *,
    skip: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Zoo, list[Planned]]:
    """Import networks into a new zoo, or into one that an import began.

    Nothing is written if a file cannot be imported, unless such files are to be skipped.

    Args:
        folder: of the networks, files or folders of any family.
        targets: a table in CSV, Parquet or JSON lines; its column ``file`` names each network.
        out: the folder of the zoo.
        options: how to open the networks.
        skip: leave out what cannot be imported.
        progress: called with the number of imported networks and of all to import.

    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> for seed in range(2):
    ...     _ = write_example_checkpoint(f"nets/run-{seed}", seed)
    >>> _ = Path("scores.csv").write_text("file,loss\\nrun-0,3.1\\nrun-1,2.9\\n")
    >>> zoo, planned = import_networks(Path("nets"), Path("scores.csv"), Path("zoo"))
    >>> zoo
    Zoo('zoo', 2 networks: llama; targets: loss)
    """
    planned = plan_import(folder, targets, out, options)
    check_plan(planned, folder, skip=skip)
    zoo = Zoo.create(out)

    def networks() -> Iterator[tuple[Model, str, Mapping[str, Value]]]:
        chosen = [each for each in planned if each.action == "import"]
        for i, each in enumerate(chosen):
            if progress is not None:
                progress(i, len(chosen))
            with open_network(folder / each.file, options or OpenOptions()) as model:
                yield model, plain_name(each.file), each.targets

    zoo.extend(networks())
    return zoo, planned


def check_plan(
    planned: list[Planned], folder: Path, *, skip: bool, others: str = ": see --dry-run"
) -> None:
    """Refuse an import of which nothing is left, or with files that cannot be imported.

    Args:
        planned: by `plan_import`.
        folder: of the networks.
        skip: files that cannot be imported are left out.
        others: where the reasons beyond the first stand.
    """
    reasons = [each.reason for each in planned if each.reason]
    if reasons and not skip:
        more = f" ({len(reasons) - 1} more{others})" if len(reasons) > 1 else ""
        raise ImportFileError(f"{reasons[0]}{more}")
    if len(reasons) == len(planned):
        raise ImportFileError(f"'{folder}' holds no network to import: {reasons[0]}")


def _existing(out: Path) -> Zoo | None:
    """The zoo that an import continues; None for a new one."""
    if zoo_kind(out) == MODELS_KIND:
        return Zoo.open(out)
    check_outside_zoos(out)
    check_fresh(out)
    return None


def _check_present(zoo: Zoo, row: int, path: Path, targets: Mapping[str, Value]) -> None:
    """Refuse a network that was imported with other targets, or before its file changed."""
    recorded = zoo.config(row)
    both = [(recorded.get(name), value) for name, value in targets.items()]
    if any(a != b and (a == a or b == b) for a, b in both):  # a missing number is NaN
        raise ImportFileError(
            f"'{zoo.path}' already holds '{recorded['network']}' with other targets: import into "
            "another folder"
        )
    if path.exists() and _changed(path) > _changed(zoo.folder(row)):
        raise ImportFileError(
            f"'{path}' is newer than its copy in '{zoo.path}': import into another folder"
        )


def _changed(path: Path) -> float:
    """When a file, or one of the files of a folder, was last written."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return max((file.stat().st_mtime for file in files), default=0.0)


def _planned(
    folder: Path, table: TargetTable, at: int, options: OpenOptions, zoo: Zoo | None
) -> Planned:
    if at in table.problems:
        raise ImportFileError(table.problems[at])
    file, targets = table.files[at], table.row(at)
    if not (folder / file).exists():
        raise ImportFileError(f"{table.place(at)}: there is no such file in '{folder}'")
    check_name(plain_name(file))
    if zoo is not None and len(zoo):
        check_targets(targets, zoo.config(0), file, zoo.path)
    try:
        network = open_network(folder / file, options)
    except UnknownFamilyError:
        raise ImportFileError(
            f"'{folder / file}' has no config.json with a model_type, and its tensors are those of "
            "no known family (tnfn architectures)"
        ) from None
    with network as model:
        model.check_numbers()
        return Planned(file, model.binding.family.name, targets=targets)


def import_arrays(
    file: Path, out: Path, layout: Path | None = None, table: Path | None = None, *,
    skip: bool = False,
) -> Zoo:  # fmt: skip
    """Import a file of arrays into a new zoo, see `Zoo.from_arrays`.

    Args:
        file: of one array ``[networks, numbers]``, or of several ``[networks, *shape]`` by name.
        out: the folder of the zoo.
        layout: a JSON file with names and shapes, in the order of the numbers of one array.
        table: of targets, a line for each network in order.
        skip: leave out networks whose weights are not finite.
    """
    arrays = _read_arrays(file)
    if layout is not None:
        if len(arrays) != 1:
            raise ImportFileError(
                f"'{file}' holds {len(arrays)} arrays: a layout is for one array of rows"
            )
        shapes = read_object(layout, ImportFileError)
        weights = next(iter(arrays.values()))
    else:
        if len(arrays) == 1 and next(iter(arrays.values())).ndim <= 2:
            raise ImportFileError(
                f"'{file}' holds one array: name a JSON file of names and shapes with --layout"
            )
        counts = {name: w.shape[0] for name, w in arrays.items()}
        if len(set(counts.values())) > 1:
            odd = max(counts, key=lambda name: list(counts.values()).count(counts[name]) == 1)
            raise ImportFileError(
                f"'{file}': arrays expected a row for each network, found {counts[odd]} in '{odd}' "
                f"and {next(n for n in counts.values() if n != counts[odd])} in others"
            )
        shapes = {name: list(w.shape[1:]) for name, w in arrays.items()}
        weights = torch.cat([rows_of(w) for w in arrays.values()], 1)
    return Zoo.from_arrays(out, weights, shapes, table, skip=skip)


def _read_arrays(file: Path) -> dict[str, Tensor]:
    """Arrays of a file by name; pickles are never read."""
    if file.suffix == ".safetensors":
        return {name: torch.atleast_1d(w) for name, w in read_tensors(file)[0].items()}
    try:
        read = np.load(file, allow_pickle=False)
        named = {file.stem: read} if isinstance(read, np.ndarray) else {k: read[k] for k in read}
        return {name: torch.from_numpy(np.ascontiguousarray(w)) for name, w in named.items()}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ImportFileError(f"'{file}' cannot be read as arrays of numbers: {error}") from error
