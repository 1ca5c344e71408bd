"""The cells of a table as tasks of a Ray cluster, each on one core or one GPU.

Workers read the zoo and write their cells themselves, so both folders must be on a disk that every
node sees. A worker that dies is replaced; what it had trained is resumed from its saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.paper.cells import Cell, fill_cell
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.ray_cluster import one_core_task, ray_cluster, task_result

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
    with ray_cluster(address, RunError) as ray:
        task = one_core_task(ray, _work, how["device"], RETRIES)
        where = zoo_path.resolve(), out.resolve()
        waiting = {task.remote(where[0], cell, where[1], how): cell for cell in cells}
        found: dict[str, RunRecord] = {}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            cell = waiting.pop(done)
            lost = f"cell '{cell.folder}' was lost on the cluster"
            found[cell.folder] = task_result(ray, done, RunError, lost)
            if progress is not None:
                progress(cell, {"done": True, "record": found[cell.folder]})
        return [found[cell.folder] for cell in cells]
