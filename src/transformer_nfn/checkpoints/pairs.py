"""Relations of all pairs of checkpoints in a folder: resumable, on this machine or on Ray."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from transformer_nfn.checkpoints.families import OpenOptions, open_model
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.checkpoint import checkpoint_paths
from transformer_nfn.io.files import blank_figure, save_figure, write_text
from transformer_nfn.io.json_fields import Fields, read_object
from transformer_nfn.ray_cluster import one_core_task, ray_cluster, task_result

Engine = Literal["local", "ray"]
KIND, FORMAT = "transformer-nfn pairs", 1
FAILED, INCOMPARABLE = "failed", "not comparable"
RELATED = ("same", "same backbone", "derived", "partly")
"""Verdicts that put two models into one group."""
WRITE_EVERY = 5.0
"""Seconds between writes of finished pairs."""
RETRIES = 2
NUMBERED = 16
"""Largest number of models whose figure has a number in each cell."""


class PairsError(TransformerNFNError):
    """A folder whose checkpoints cannot be compared, or a file of pairs that cannot be read."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of a folder.

    Attributes:
        name: path below the folder.
        path: full path.
        identity: hash that changes when its files do.
        family: architecture, width and number of blocks: ``gpt2, 768 wide, 12 blocks``.
    """

    name: str
    path: Path
    identity: str
    family: str


@dataclass(frozen=True)
class Pair:
    """Relation of two models of a folder.

    Attributes:
        a: name of the first model.
        b: name of the second.
        identities: of both when they were compared.
        verdict: of `relate`; ``not comparable`` where shapes or families differ too much,
            ``failed`` where a file could not be read.
        score: 0 for unrelated models, 1 for a disguise; None where nothing was compared.
        same_function: True, False, or None where that is not known.
        reason: one sentence.
    """

    a: str
    b: str
    identities: tuple[str, str]
    verdict: str
    score: float | None
    same_function: bool | None
    reason: str


@dataclass(frozen=True)
class AllPairs:
    """All pairs of a folder.

    Attributes:
        models: architecture of each checkpoint, by name.
        not_read: why other checkpoints could not be read, by name.
        pairs: every pair of models.

    >>> pair = Pair("a", "c", ("", ""), "derived", 0.9, False, "")
    >>> AllPairs(dict.fromkeys("abc", "gpt2"), {}, (pair,)).groups()
    [['a', 'c'], ['b']]
    """

    models: dict[str, str]
    not_read: dict[str, str]
    pairs: tuple[Pair, ...]

    def groups(self) -> list[list[str]]:
        """Models joined by a related verdict, directly or through others; largest group first."""
        group = {name: [name] for name in self.models}
        for pair in self.pairs:
            a, b = group[pair.a], group[pair.b]
            if pair.verdict in RELATED and a is not b:
                a += b
                for name in b:
                    group[name] = a
        unique = {id(members): sorted(members) for members in group.values()}
        return sorted(unique.values(), key=lambda members: (-len(members), members))

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "models": self.models,
            "not_read": self.not_read,
            "pairs": [asdict(pair) for pair in self.pairs],
            "groups": self.groups(),
        }


def relate_folder(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    engine: Engine = "local",
    options: OpenOptions | None = None,
    progress: Callable[[int, int, Pair | None], None] | None = None,
) -> AllPairs:
    """Relate every pair of the checkpoints below a folder, by `relate`.

    Args:
        out: a JSON file of finished pairs. A second run reuses those whose files have not changed,
            and computes the others, failed ones included.
        engine: ``local``, one pair after another, or ``ray``, one core for each; its workers must
            see the folder under the same path.
        progress: called with the numbers of finished and of all pairs, and the last pair.

    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> for name, seed in (("original", 0), ("copy", 0), ("other", 1)):
    ...     _ = write_example_checkpoint(f"models/{name}", seed)
    >>> relate_folder("models").groups()
    [['copy', 'original'], ['other']]
    """
    if engine not in ("local", "ray"):
        raise PairsError(f"the engine must be 'local' or 'ray', found '{engine}'")
    candidates, not_read = read_folder(folder, options)
    models = {candidate.name: candidate.family for candidate in candidates}
    wanted = [(a, b) for i, a in enumerate(candidates) for b in candidates[i + 1 :]]
    stored = {} if out is None else {(p.a, p.b): p for p in _read_pairs(Path(out))}
    done: dict[tuple[str, str], Pair] = {}
    for a, b in wanted:
        pair = stored.get((a.name, b.name))
        if pair and pair.verdict != FAILED and pair.identities == (a.identity, b.identity):
            done[a.name, b.name] = pair
    left = [(a, b) for a, b in wanted if (a.name, b.name) not in done]
    if progress is not None:
        progress(len(done), len(wanted), None)
    here = (relate_pair(a, b, options) for a, b in left)
    run = here if engine == "local" else _ray(left, options)

    def write() -> None:
        if out is not None:
            content = AllPairs(models, not_read, tuple(done.values())).as_json()
            write_text(Path(out), json.dumps(content, indent=1) + "\n")

    write()  # now, so that a file that cannot be written fails at the start
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
    return AllPairs(models, not_read, tuple(done[a.name, b.name] for a, b in wanted))


def read_folder(
    folder: str | Path, options: OpenOptions | None
) -> tuple[list[Candidate], dict[str, str]]:
    """The checkpoints below a folder, and by name why others cannot be read.

    Args:
        folder: to search, to any depth; links to folders are not followed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PairsError(f"'{folder}': no such folder")
    candidates, not_read = [], {}
    for path in sorted(checkpoint_paths(folder)):
        name = str(path.relative_to(folder))
        try:
            with open_model(path, options) as model:
                description = model.description
        except TransformerNFNError as error:
            not_read[name] = str(error)
            continue
        depth = len(description.blocks)
        family = f"{description.family}, {description.width} wide, {depth} blocks"
        candidates.append(Candidate(name, path, _identity(path, options), family))
    if len(candidates) < 2:
        reason = next((f": {text}" for text in not_read.values()), "")
        raise PairsError(
            f"'{folder}': expected at least two checkpoints that can be read, found "
            f"{len(candidates)}{reason}"
        )
    return candidates, not_read


def _identity(path: Path, options: OpenOptions | None) -> str:
    """Short hash of the names, lengths and times of a checkpoint's files, and of the options."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    facts = [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
    if options:
        facts.append(str(options))
        if options.architecture is not None:
            facts.append(options.architecture.read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def relate_pair(a: Candidate, b: Candidate, options: OpenOptions | None) -> Pair:
    """Relate one pair; a checkpoint that cannot be read makes it a failed one."""
    try:
        with open_model(a.path, options) as A, open_model(b.path, options) as B:
            relation = relate(A, B)
    except TransformerNFNError as error:
        return _failed(a, b, error)
    compared = relation.score is not None or relation.matrix is not None
    return Pair(
        a.name,
        b.name,
        (a.identity, b.identity),
        relation.verdict if compared or relation.verdict == "same" else INCOMPARABLE,
        relation.score if relation.score is not None else _best(relation.matrix),
        relation.same_function,
        relation.reason if compared else f"{a.family} against {b.family}: {relation.reason}",
    )


def _failed(a: Candidate, b: Candidate, error: TransformerNFNError) -> Pair:
    return Pair(a.name, b.name, (a.identity, b.identity), FAILED, None, None, str(error))


def _best(matrix: torch.Tensor | None) -> float | None:
    """Score of models of different depth: mean best score of each block of the shallower one."""
    if matrix is None or matrix.numel() == 0:
        return None
    return float(matrix.amax(1 if matrix.shape[0] <= matrix.shape[1] else 0).mean())


def _ray(
    left: Sequence[tuple[Candidate, Candidate]], options: OpenOptions | None
) -> Iterator[Pair]:
    """Pairs as they finish. Dead workers are replaced; a pair that keeps killing them fails."""
    if not left:
        return
    with ray_cluster(None, PairsError) as ray:
        task = one_core_task(ray, relate_pair, 0, RETRIES)
        waiting = {}
        for a, b in left:
            absolute = [replace(model, path=model.path.resolve()) for model in (a, b)]
            waiting[task.remote(*absolute, options and options.absolute())] = a, b
        while waiting:
            (finished,), _ = ray.wait(list(waiting), num_returns=1)
            a, b = waiting.pop(finished)
            try:
                lost = f"the pair of '{a.name}' and '{b.name}' was lost on the cluster"
                yield task_result(ray, finished, PairsError, lost)
            except PairsError as error:
                yield _failed(a, b, error)


def _read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file; none where there is no file yet."""
    if not path.exists():
        return []
    content = Fields(read_object(path, PairsError), str(path), PairsError)
    if content.text("kind") != KIND:
        raise PairsError(f"'{path}': expected kind '{KIND}', found '{content.text('kind')}'")
    version = content.whole("format")
    if version != FORMAT:
        raise PairsError(
            f"'{path}': pairs of format {version}, expected {FORMAT}; name another file"
        )
    return [_pair(fields, path) for fields in content.each("pairs", Fields.inner)]


def _pair(fields: Fields, path: Path) -> Pair:
    identities, same = fields.items("identities"), fields.data.get("same_function")
    if [type(text) for text in identities] != [str, str] or type(same) not in (bool, type(None)):
        raise PairsError(f"'{path}': damaged, a pair has invalid fields")
    return Pair(
        fields.text("a"),
        fields.text("b"),
        (identities[0], identities[1]),
        fields.text("verdict"),
        fields.number("score") if fields.has("score") else None,
        same,
        fields.text("reason"),
    )


def draw_pairs(result: AllPairs, out: str | Path) -> Path:
    """Draw the scores of all pairs as a heat map into ``out`` (png, pdf or svg by its name)."""
    names = [name for group in result.groups() for name in group]
    place = {name: i for i, name in enumerate(names)}
    scores = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(scores, 1.0)
    for pair in result.pairs:
        if pair.score is not None:
            i, j = place[pair.a], place[pair.b]
            scores[i, j] = scores[j, i] = pair.score
    size = 2.5 + (0.45 if len(names) <= NUMBERED else 0.22) * len(names)
    figure = blank_figure(size + 1, size, PairsError)
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    image = axes.imshow(scores, vmin=0, vmax=1, cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(names) <= NUMBERED:
        for (i, j), score in np.ndenumerate(scores):
            text = "–" if np.isnan(score) else f"{score:.2f}"
            colour = "black" if not score < 0.6 else "white"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    axes.set_title("all pairs, related ones together; grey: not comparable", loc="left", fontsize=9)
    figure.colorbar(image, ax=axes, label="score (unrelated 0, disguise 1)")
    return save_figure(figure, Path(out), PairsError)
