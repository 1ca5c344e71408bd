"""The cells of a table as tasks of a Ray cluster, each on one core or one GPU.

Workers read the zoo and write their cells themselves, so both folders must be on a disk that every
node sees. A worker that dies is replaced; what it had trained is resumed from its saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.errors import TransformerNFNError, missing_extra
from transformer_nfn.paper.cells import Cell, fill_cell
from transformer_nfn.prediction.records import RunError, RunRecord

RETRIES = 2


def _work(zoo_path: Path, cell: Cell, out: Path, how: dict[str, Any]) -> RunRecord:
    """What a worker does; one thread, because there is a worker for every core."""
    torch.set_num_threads(1)
    return fill_cell(zoo_path, cell, out, **how)


def fill_cells_on_ray(
    zoo_path: Path,
    cells: Sequence[Cell],
    out: Path,
    how: dict[str, Any],
    *,
    address: str | None = None,
    progress: Callable[[Cell, dict[str, Any]], None] | None = None,
) -> list[RunRecord]:
    """Fills every cell, as many at once as the cluster takes; in the order of ``cells``.

    Args:
        zoo_path, cells, out: see `transformer_nfn.paper.cells.fill_cell`.
        how: its other arguments.
        address: of the cluster; None starts one on this machine, unless Ray runs already.
        progress: called with each cell that is done.
    """
    with _cluster(address) as ray:
        gpus = 1 if "cuda" in how["device"] else 0
        task = ray.remote(_work).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
        where = zoo_path.resolve(), out.resolve()
        waiting = {task.remote(where[0], cell, where[1], how): cell for cell in cells}
        found: dict[str, RunRecord] = {}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            cell = waiting.pop(done)
            found[cell.folder] = _result(ray, done, cell)
            if progress is not None:
                progress(cell, {"done": True, "record": found[cell.folder]})
        return [found[cell.folder] for cell in cells]


def _result(ray: Any, reference: Any, cell: Cell) -> RunRecord:
    try:
        record: RunRecord = ray.get(reference)
    except TransformerNFNError as error:
        # Ray wraps what a worker raised in a class of both kinds, with the worker's traceback.
        raise RunError(str(getattr(error, "cause", error))) from error
    except ray.exceptions.RayError as error:
        raise RunError(
            f"cell '{cell.folder}' was lost on the cluster ({type(error).__name__})"
        ) from error
    return record


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    try:
        import ray
    except ImportError as error:
        raise missing_extra(RunError, "ray", "ray", "--engine ray") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        if address is None:
            ray.init(include_dashboard=False, log_to_driver=False)
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = address or "this machine"
        raise RunError(f"no Ray cluster at {where} ({str(error)[:120]})") from error
    try:
        yield ray
    finally:
        ray.shutdown()
