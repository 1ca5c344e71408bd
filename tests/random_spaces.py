"""Random weight spaces: every action, owners, ties, several matrices on one tensor, shifts."""

from __future__ import annotations

from hypothesis import strategies as st

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Axis, Shift, WeightSpace

MAX_ENTRIES = 400
FORMS = {
    "linear": (1, 2, 3),
    "complex": (2, 4),
    "complex_halves": (2, 4),
    "scale": (1, 2, 3),
    "positive": (1, 2, 3),
    "sign": (1, 2, 3),
    "orthogonal": (1, 2, 3),
}


@st.composite
def descriptions(draw: st.DrawFn) -> tuple[list[Axis], dict[str, str], list[Shift]]:
    """Axes, tensors and shifts that may or may not make a space."""
    axes: dict[str, Axis] = {}

    def add(axis: Axis) -> None:
        axes[axis.name] = axis

    for i in range(draw(st.integers(1, 2))):
        add(Axis.free(f"f{i}", draw(st.integers(1, 3))))
    for i in range(draw(st.integers(1, 2))):
        add(Axis.perm(f"p{i}", draw(st.integers(1, 4))))
    perms = [a for a in axes if a.startswith("p")]
    for i in range(draw(st.integers(0, 2))):
        add(Axis.perm(f"q{i}", draw(st.integers(1, 3)), of=draw(st.sampled_from(perms))))
        perms.append(f"q{i}")
    for i in range(draw(st.integers(1, 3))):
        add(draw(_rebased(f"g{i}", perms)))
    tensors = {}
    for name in (a for a in axes if a.startswith("g")):
        for star in ("", "*"):
            if draw(st.integers(0, 5)):
                tensors[f"W{len(tensors)}"] = draw(_tensor(axes, name + star))
    for _ in range(draw(st.integers(0, 3))):
        tensors[f"W{len(tensors)}"] = draw(_tensor(axes, None))
    shifts = draw(_shifts(axes, tensors)) if tensors and not draw(st.integers(0, 3)) else []
    return list(axes.values()), tensors, shifts


@st.composite
def _rebased(draw: st.DrawFn, name: str, perms: list[str]) -> Axis:
    form = draw(st.sampled_from(sorted(FORMS)))
    size = draw(st.sampled_from(FORMS[form]))
    of = draw(st.sampled_from(perms))
    if form in ("linear", "complex", "complex_halves"):
        return Axis.linear(name, size, of, "general" if form == "linear" else form)
    return Axis(name, size, form, of if draw(st.booleans()) else None)


def _owners(axes: dict[str, Axis], name: str) -> list[str]:
    of = axes[name].of
    return [] if of is None else [*_owners(axes, of), of]


@st.composite
def _tensor(draw: st.DrawFn, axes: dict[str, Axis], first: str | None) -> str:
    """The words of a tensor in any order, owners included; sometimes a perm axis twice."""
    words = [] if first is None else [first]
    names = [a for a in axes if first is None or a != first.rstrip("*")]
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        # Two matrices on one tensor are rarer than one, or too few spaces would be plain.
        if name.startswith("g") and draw(st.integers(0, 2)):
            continue
        words.append(name + "*" * (name.startswith("g") and draw(st.booleans())))
    for word in list(words):
        words += [a for a in _owners(axes, word.rstrip("*")) if a not in words]
    owners = {a for word in words for a in _owners(axes, word.rstrip("*"))}
    loose = [w for w in words if w.startswith("p") and w not in owners]
    if loose and not draw(st.integers(0, 4)):
        words.append(loose[0])
    words = draw(st.permutations(words))
    kept: list[str] = []
    entries = 1
    for word in words:
        entries *= axes[word.rstrip("*")].size
        kept.append(word)
    return " ".join(kept) if entries <= MAX_ENTRIES else (first and _small(axes, first)) or ""


def _small(axes: dict[str, Axis], word: str) -> str:
    return " ".join([*_owners(axes, word.rstrip("*")), word])


@st.composite
def _shifts(draw: st.DrawFn, axes: dict[str, Axis], tensors: dict[str, str]) -> list[Shift]:
    """One bias that moves through a tensor into another, added to ``tensors``."""
    through = draw(st.sampled_from(sorted(tensors)))
    words = tensors[through].split()
    inner = [w for w in words if w.startswith("g")]
    if not inner:
        return [Shift(through)]
    word = inner[0]
    opposite = word.rstrip("*") if word.endswith("*") else f"{word}*"
    taken = [*_owners(axes, word.rstrip("*")), opposite]
    gone = {w.rstrip("*") for w in taken}
    tensors["c"] = " ".join(taken)
    left = [w for w in words if w.rstrip("*") not in gone]
    inner = {a for w in left for a in _owners(axes, w.rstrip("*"))}
    # What the bias lacks is summed over.
    summed = draw(st.integers(0, 2)) == 0
    tensors["b"] = " ".join(w for w in left if not summed or w[0] in "fg" or w in inner)
    return [Shift("c", through=through, into="b")]


def build(description: tuple[list[Axis], dict[str, str], list[Shift]]) -> WeightSpace | str:
    """The space, or the sentence that refuses it."""
    axes, tensors, shifts = description
    if not tensors:
        return "a space needs tensors"
    try:
        return WeightSpace.build("random", axes, tensors, shifts=shifts)
    except SpaceError as error:
        return str(error)
