"""What is right for a damaged input, and what a command that got it did instead."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Words = tuple[str, ...]
NO_NUMBER = re.compile(r"(?<![\w./'\"-])[-+]?(nan|inf|infinity)(?![\w./'\"])", re.IGNORECASE)


class Right(Enum):
    """What a command should do."""

    REFUSED = "refused in one sentence, exit code 2"
    EQUAL = "harmless: the answer of the undamaged input"
    EQUAL_OR_REFUSED = "never another answer than that of the undamaged input"
    ACCEPTED = "harmless: the exit code of the undamaged input"
    ANSWERED = "other, but meaningful input: an answer of its own, or refused"


@dataclass(frozen=True)
class Damage:
    """What was done to an input, and what is right then."""

    what: str
    right: Right


@dataclass(frozen=True)
class Case:
    """A command on a damaged input.

    Attributes:
        words: of the command, run in the case's own folder.
        damage: of its input.
        answers: exit codes that answer.
        bad: exit codes that say the input is bad; `tnfn zoo verify` says so with 1.
        varies: whether its answer holds what differs every time, such as seconds.
        whole: words of the command on the undamaged input.
        streams: see `drawn_damage.streams`.
    """

    words: Words
    damage: Damage
    answers: tuple[int, ...] = (0,)
    bad: tuple[int, ...] = (2,)
    varies: bool = False
    whole: Words = ()
    streams: Mapping[int, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a command ended.

    Attributes:
        status: exit code; negative for the signal that ended it; None if it hung.
        writes: paths outside its own folder that it wrote to, made or removed.
        left: paths in its own folder that were not there before.
        records: texts of files in JSON among those.
    """

    status: int | None
    stdout: str
    stderr: str
    seconds: float
    writes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)


FAULTS = (
    "traceback", "abort", "hang", "wrong exit code", "wrongly accepted", "wrongly refused",
    "wrong answer", "not one sentence", "no JSON", "no number", "files outside", "files left",
    "warning of Python",
)  # fmt: skip


def fault(case: Case, outcome: Outcome, undamaged: Outcome) -> str | None:
    """Which of `FAULTS` this is, None if it is right."""
    right = case.damage.right
    if outcome.status is None:
        return "hang"
    if outcome.status < 0 or outcome.status in (134, 139):
        return "abort"
    if outcome.status == 70 or "Traceback" in outcome.stderr:
        return "traceback"
    if "Warning: " in outcome.stderr:
        return "warning of Python"
    if outcome.writes:
        return "files outside"
    full = "full" in case.streams.values()
    if outcome.status == 2 and outcome.left and not full:
        return "files left"
    if (outcome.status, "gone") in {(141, how) for how in case.streams.values()}:
        return None
    if outcome.status in case.bad:
        told = outcome.stderr
        if full:  # what was said before, such as the problems of a zoo, stands above
            told = told.strip().rpartition("\n")[2]
        if outcome.status == 2 and 2 not in case.streams and not _one_sentence(told):
            return "not one sentence"
        harmless = right in (Right.EQUAL, Right.ACCEPTED) and undamaged.status not in case.bad
        return "wrongly refused" if harmless and not full else None
    if outcome.status not in case.answers:
        return "wrong exit code"
    if right is Right.REFUSED:
        return "wrongly accepted"
    texts = outcome.records + [outcome.stdout] * ("--json" in case.words and 1 not in case.streams)
    if not all(map(_strict_json, texts)):
        return "no JSON"
    if NO_NUMBER.search(outcome.stdout.replace("NaN or infinity", "")):
        return "no number"
    same = outcome.status == undamaged.status
    if not (case.varies or case.streams or right is Right.ACCEPTED):
        same = same and outcome.stdout == undamaged.stdout
    return None if right is Right.ANSWERED or same else "wrong answer"


def _one_sentence(stderr: str) -> bool:
    """One line, perhaps with indented lines to copy; or Typer's own box around a wrong word."""
    first, *copied = stderr.splitlines() or [""]
    told = first.startswith("error: ") and all(line.startswith("  ") for line in copied)
    return told or stderr.startswith("Usage: ")


def _strict_json(text: str) -> bool:
    def no(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=no)
    except ValueError:
        return False
    return True
