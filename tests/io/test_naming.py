"""Tensors of files and of spaces, both ways: against slices written out by hand."""

import pytest
import torch

from cases import draw, gen
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import Architecture, Vectors
from transformer_nfn.io.layout import Naming
from transformer_nfn.spaces import Axis, WeightSpace

D, H, K, V, T = 5, 3, 2, 4, 7
SPACE = WeightSpace.build(
    "attention",
    [
        Axis.free("token", T),
        Axis.perm("stream", D),
        Axis.perm("head", H),
        Axis.scale("gain", 1, of="stream"),
        Axis.linear("qk", K, of="head"),
        Axis.linear("vo", V, of="head"),
    ],
    {
        "W_E": "token stream",
        "g": "stream gain",
        "W_Q": "head stream gain* qk",
        "W_K": "head stream gain* qk*",
        "W_V": "head stream gain* vo",
        "W_O": "head vo* stream",
    },
)
LINES = {
    "wte": "W_E: token stream",
    "norm": "g: stream",
    "q": "W_Q: (head qk) stream",
    "k": "W_K: stream (head qk)",
    "v": "W_V: (head vo) stream",
    "o": "W_O: stream (head vo)",
}


def network(seed=0):
    return {name: w[0, 0] for name, w in draw(SPACE, seed).items()}


def both_ways(lines, shapes=None, **options):
    """A file written from random weights, after checking that reading it gives them back."""
    naming = Naming(lines, shapes or {}, **options)
    naming.check(SPACE)
    U = network()
    file = naming.write(SPACE, U)
    back = naming.read(SPACE, file)
    assert list(back) == list(SPACE.tensors)
    assert all(torch.equal(back[name], U[name]) for name in U)
    return U, file


def test_axes_are_merged_and_transposed_as_the_layout_says():
    U, file = both_ways(LINES)
    for h in range(H):
        assert torch.equal(file["q"][h * K : (h + 1) * K], U["W_Q"][h, :, 0].T)
        assert torch.equal(file["k"][:, h * K : (h + 1) * K], U["W_K"][h, :, 0])
        assert torch.equal(file["o"][:, h * V : (h + 1) * V], U["W_O"][h].T)
    assert torch.equal(file["norm"], U["g"][:, 0])


def test_one_tensor_may_be_split_over_several_of_the_file():
    lines = {name: line for name, line in LINES.items() if name != "v"}
    U, file = both_ways(lines | {"heads.{head}.v": "W_V: vo stream"})
    for h in range(H):
        assert torch.equal(file[f"heads.{h}.v"], U["W_V"][h, :, 0].T)


def test_constants_are_written_and_strangers_are_left_alone():
    U, file = both_ways(LINES, constants={"positions": torch.ones(2)})
    assert "positions" in file
    naming, more = Naming(LINES), file | {"other": torch.ones(1)}
    assert torch.equal(naming.read(SPACE, more)["W_Q"], U["W_Q"])


def tied():
    space = WeightSpace.build(
        "tied",
        [Axis.free("token", T), Axis.perm("stream", D)],
        {"W_E": "token stream", "W_C": "stream token"},
    )
    return space, Naming({"wte": "W_E: token stream = W_C: token stream"})


def test_tied_tensors_are_read_from_one_and_written_if_they_agree():
    space, naming = tied()
    w = torch.randn(T, D, generator=gen(1))
    read = naming.read(space, {"wte": w})
    assert torch.equal(read["W_E"], w)
    assert torch.equal(read["W_C"], w.T)
    assert torch.equal(naming.write(space, read)["wte"], w)
    with pytest.raises(SpaceError, match="'wte' ties 'W_E', 'W_C', which are not equal"):
        naming.write(space, {**read, "W_C": read["W_C"] + 1})


def test_a_tied_head_may_be_absent_but_not_different():
    naming = Naming(LINES | {"head": "W_E: token stream"})
    file = naming.write(SPACE, network())
    assert torch.equal(file["head"], file["wte"])
    del file["head"]
    naming.read(SPACE, file)
    with pytest.raises(SpaceError, match=r"'head' disagrees with another tensor .* about 'W_E'"):
        naming.read(SPACE, file | {"head": file["wte"] + 1})


def test_a_lazy_file_is_asked_for_what_is_read_and_nothing_else():
    file, asked = Naming(LINES).write(SPACE, network()), []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    Naming(LINES).read(SPACE, Lazy(file | {"other": torch.ones(1)}))
    assert sorted(asked) == sorted(file)


BAD_FILES = {
    "missing": (lambda f: f.pop("q"), "state dict lacks 'q', which holds 'W_Q'"),
    "axis": (
        lambda f: f.update(q=torch.ones(4, D)),
        r"'q': expected shape \[6, 5\], found \[4, 5\]: axis 0 \(head qk\), which holds 'W_Q'",
    ),
    "axes": (
        lambda f: f.update(o=torch.ones(D)),
        r"'o': expected shape \[5, 12\], found \[5\]: which holds 'W_O'",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_do_not_fit_are_explained(spoil, message):
    file = Naming(LINES).write(SPACE, network())
    spoil(file)
    with pytest.raises(SpaceError, match=message):
        Naming(LINES).read(SPACE, file)


BAD_NAMINGS = {
    "nothing holds": ({"wte": "W_E: token stream"}, "no line of the naming holds 'g'"),
    "unknown tensor": (LINES | {"x": "W_X: stream"}, "line 'x' must say 'TENSOR: LAYOUT'"),
    "no layout": (LINES | {"q": "W_Q"}, "line 'q' must say 'TENSOR: LAYOUT'"),
    "axis left out": (LINES | {"q": "W_Q: head qk"}, "'W_Q' in 'q' leaves out 'stream', .* size 5"),
    "strange axis": (LINES | {"q": "W_Q: head stream vo"}, "names 'vo' 1 times, the tensor 0"),
    "parenthesis": (LINES | {"q": "W_Q: (head qk stream"}, "a parenthesis that does not close"),
    "two pluses": (LINES | {"q": "W_Q: +(head + qk) stream"}, "more than one plus"),
    "misfits": (
        LINES | {"q": "W_Q: stream +(head qk), W_O: +(head vo) stream"},
        "cannot stand side by side",
    ),
    "no plus": (LINES | {"q": "W_Q: head stream qk, W_K: head stream qk"}, "so a plus must say"),
    "turns of other sizes": (
        LINES | {"q": "W_Q: (head + qk) stream, W_V: (head + vo) stream"},
        "cannot stand side by side",
    ),
    "strange count": (LINES | {"{head}.n": "g: stream"}, "an axis that not all its tensors carry"),
    "two counts": (LINES | {"{head}.{qk}": "W_Q: stream"}, "must count the indices of one axis"),
}


@pytest.mark.parametrize(("lines", "message"), BAD_NAMINGS.values(), ids=BAD_NAMINGS)
def test_namings_that_contradict_the_space_are_refused(lines, message):
    with pytest.raises(SpaceError, match=message):
        Architecture(SPACE, lambda w, x: x, Vectors(width=T), Naming(lines))


def test_an_architecture_reads_and_writes_one_network():
    architecture = Architecture(SPACE, lambda w, x: x, Vectors(width=T), Naming(LINES))
    U = draw(SPACE, 2)
    back = architecture.read(architecture.write(U))
    assert all(torch.equal(back[name], U[name]) for name in U)
    with pytest.raises(SpaceError, match="a file holds one network, found several"):
        architecture.write(draw(SPACE, 2, batch=2))
    with pytest.raises(SpaceError, match="not finite"):
        architecture.read(architecture.write({n: w * float("nan") for n, w in U.items()}))
