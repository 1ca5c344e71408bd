"""Relate all pairs of a folder's checkpoints, here or on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_nfn.checkpoints.families import OpenOptions, open_model
from transformer_nfn.checkpoints.pairs.checkpoints import Found, read_folder
from transformer_nfn.checkpoints.pairs.results import (
    Pair,
    PairsError,
    as_json,
    groups,
    read_pairs,
    write_pairs,
)
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.ray_cluster import one_core_task, ray_cluster, task_result

Engine = Literal["local", "ray"]
WRITE_EVERY = 5.0
"""Seconds after which finished pairs are on the disk, whatever happens."""
RETRIES = 2
FAILED, APART = "failed", "not comparable"


@dataclass(frozen=True)
class AllPairs:
    """All pairs of a folder.

    Attributes:
        models: the checkpoints, by name.
        not_read: other checkpoints, and why they could not be read.
        pairs: every pair of models.
    """

    models: dict[str, str]
    not_read: dict[str, str]
    pairs: tuple[Pair, ...]

    def groups(self) -> list[list[str]]:
        """Models that are related, directly or through others."""
        return groups(self.models, self.pairs)

    def as_json(self) -> dict[str, Any]:
        """Everything, as words and numbers."""
        return as_json(self.models, self.not_read, self.pairs)


def relate_folder(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    engine: Engine = "local",
    options: OpenOptions | None = None,
    address: str | None = None,
    progress: Callable[[int, int, Pair | None], None] | None = None,
) -> AllPairs:
    """Relates every pair of the checkpoints below a folder, by `relate`.

    Args:
        folder: to look in.
        out: a JSON file that keeps finished pairs. A second run takes those from it whose files
            have not changed, and does the others, failed ones included.
        engine: ``local``, one pair after another, or ``ray``, a core for each; its workers must
            see the folder under the same path.
        options: how all checkpoints are opened.
        address: of a Ray cluster; None starts one on this machine.
        progress: called with how many pairs are done, how many there are, and the last one.
    """
    if engine not in ("local", "ray"):
        raise PairsError(f"the engine must be 'local' or 'ray', found '{engine}'")
    found, not_read = read_folder(folder, options)
    models = {model.name: model.family for model in found}
    kept = {} if out is None else {(p.a, p.b): p for p in read_pairs(Path(out))}
    wanted = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    done: dict[tuple[str, str], Pair] = {}
    for a, b in wanted:
        pair = kept.get((a.name, b.name))
        if pair is None or pair.verdict == FAILED:
            continue
        if pair.identities == (a.identity, b.identity):
            done[a.name, b.name] = pair
    left = [(a, b) for a, b in wanted if (a.name, b.name) not in done]
    if progress is not None:
        progress(len(done), len(wanted), None)
    run = _local(left, options) if engine == "local" else _ray(left, options, address)

    def write() -> None:
        if out is not None:
            write_pairs(Path(out), as_json(models, not_read, done.values()))

    write()  # now, so that a file that cannot be written is no surprise at the end
    written = time.monotonic()
    try:
        for pair in run:
            done[pair.a, pair.b] = pair
            if progress is not None:
                progress(len(done), len(wanted), pair)
            if time.monotonic() - written > WRITE_EVERY:
                write()
                written = time.monotonic()
    finally:
        write()
    ordered = tuple(done[a.name, b.name] for a, b in wanted)
    return AllPairs(models, not_read, ordered)


def relate_pair(a: Found, b: Found, options: OpenOptions | None = None) -> Pair:
    """One pair; what cannot be read after all is said and does not stop the others."""
    identities = a.identity, b.identity
    try:
        with open_model(a.path, options) as A, open_model(b.path, options) as B:
            relation = relate(A, B)
    except TransformerNFNError as error:
        return Pair(a.name, b.name, identities, FAILED, None, None, str(error))
    compared = relation.score is not None or relation.matrix is not None
    return Pair(
        a.name,
        b.name,
        identities,
        relation.verdict if compared or relation.verdict == "same" else APART,
        relation.score if relation.score is not None else _best(relation.matrix),
        relation.same_function,
        relation.reason if compared else f"{a.family} against {b.family}: {relation.reason}",
    )


def _best(matrix: torch.Tensor | None) -> float | None:
    """Models of different depth: the mean of what each block of the shallower one finds."""
    if matrix is None or matrix.numel() == 0:
        return None
    return float(matrix.amax(1 if matrix.shape[0] <= matrix.shape[1] else 0).mean())


def _local(left: Sequence[tuple[Found, Found]], options: OpenOptions | None) -> Iterator[Pair]:
    for a, b in left:
        yield relate_pair(a, b, options)


def _work(a: Found, b: Found, options: OpenOptions | None) -> Pair:
    """What a worker does; one thread, because there is a worker for every core."""
    torch.set_num_threads(1)
    return relate_pair(a, b, options)


def _ray(
    left: Sequence[tuple[Found, Found]], options: OpenOptions | None, address: str | None
) -> Iterator[Pair]:
    """As they finish. A worker that dies is replaced; a pair that keeps killing them has failed."""
    if not left:
        return
    with ray_cluster(address, PairsError) as ray:
        task = one_core_task(ray, _work, "cpu", RETRIES)
        waiting = {}
        for a, b in left:
            sent = [Found(m.name, m.path.resolve(), m.identity, m.family) for m in (a, b)]
            waiting[task.remote(*sent, options and options.absolute())] = a, b
        while waiting:
            (finished,), _ = ray.wait(list(waiting), num_returns=1)
            a, b = waiting.pop(finished)
            try:
                lost = f"the pair of '{a.name}' and '{b.name}' was lost on the cluster"
                yield task_result(ray, finished, PairsError, lost)
            except PairsError as error:
                identities = a.identity, b.identity
                yield Pair(a.name, b.name, identities, FAILED, None, None, str(error))
