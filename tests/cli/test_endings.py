"""A command that fails says so in one sentence, with a code that no command answers with."""

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from tnfn_command import assert_refused, tnfn
from transformer_nfn.cli.compare import EXIT
from transformer_nfn.cli.endings import INTERNAL_FAULT, INTERRUPTED, PIPE_CLOSED, REFUSED
from transformer_nfn.errors import SpaceError
from transformer_nfn.io.assets import CHECKOUT
from transformer_nfn.testing import write_example_checkpoint

VERDICTS = set(EXIT.values()) | {0, 1}
"""Of `tnfn compare` and `tnfn zoo verify`."""
ENDINGS: dict[str, tuple[BaseException, int, str]] = {
    "refused": (SpaceError("no"), REFUSED, "error: no\n"),
    "many lines": (SpaceError("a\nb\x1b[0m\ud800"), REFUSED, r"error: a b\x1b[0m\ud800" + "\n"),
    "no place": (
        PermissionError(13, "Permission denied", "/x"), REFUSED, "error: '/x': Permission denied\n"
    ),
    "memory": (MemoryError(), REFUSED, "error: there is not enough memory for this\n"),
    "torch's memory": (
        RuntimeError("[enforce fail at x.cpp] . DefaultCPUAllocator: can't allocate memory: y"),
        REFUSED, "error: there is not enough memory for this\n",
    ),
    "a name that is not UTF-8": (
        UnicodeEncodeError("utf-8", "nets/\udcff.pt", 5, 6, "surrogates not allowed"), REFUSED,
        r"error: 'nets/\udcff.pt' is not UTF-8 and cannot be written: rename the file" + "\n",
    ),
    "interrupted": (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
    "end of input": (EOFError(), INTERNAL_FAULT, "internal error: EOFError"),
    "GPU": (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        INTERNAL_FAULT,
        "internal error: the GPU broke off (CUDA error: an illegal memory access was",
    ),
    "fault": (RuntimeError("?"), INTERNAL_FAULT, "internal error: RuntimeError (?)"),
    "index": (IndexError("out of range"), INTERNAL_FAULT, "internal error: IndexError (out of"),
    "recursion": (RecursionError("deep"), INTERNAL_FAULT, "internal error: RecursionError"),
}  # fmt: skip
COMMANDS = {
    "compare": ("transformer_nfn.networks.resolve_network", ("compare", "a", "b")),
    "verify": ("transformer_nfn.zoo.verify.verify", ("zoo", "verify", "mnist-sample")),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_an_error_never_ends_with_the_code_of_a_verdict(case: str) -> None:
    error, code, words = ENDINGS[case]
    for place, asked in COMMANDS.values():
        with patch(place, side_effect=error):
            done, said = tnfn(*asked), tnfn(*asked, "--json")
        assert done.returncode == said.returncode == code
        assert code not in VERDICTS
        assert done.stderr.startswith(words)
        assert len(done.stderr.splitlines()) == 1
        assert "Traceback" not in done.stderr
        assert json.loads(said.stdout)["exit_code"] == code
        assert said.stderr.removeprefix("error: ").strip() == json.loads(said.stdout)["error"]


def test_the_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place, asked = COMMANDS["compare"]
    with patch(place, side_effect=RuntimeError("here")):
        assert "set TNFN_TRACEBACK=1 and run it again" in tnfn(*asked).stderr
        monkeypatch.setenv("TNFN_TRACEBACK", "1")
        shown = tnfn(*asked).stderr
    assert "Traceback (most recent call last)" in shown
    assert "compare_command" in shown


def test_mistakes_in_the_command_line_itself_end_with_2() -> None:
    for words in (("compare", "--nothing"), ("diff",), ("zoo", "verify"), ("nothing",)):
        assert_refused("--help`", *words)
        error = tnfn(*words, "--json")
        shown = json.loads(error.stdout)
        assert (error.returncode, shown["exit_code"]) == (REFUSED, REFUSED)
        assert error.stderr == f"error: {shown['error']}\n"
    for words in ((), ("zoo",)):
        assert tnfn(*words).returncode == REFUSED


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full"])
def test_closed_streams_change_no_code(closed: str) -> None:
    for words, code in ((("inspect", "''", "--json"), REFUSED), (("--version",), 0)):
        line = f"{shlex.join(command())} {' '.join(words)} {closed}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        full = closed == ">/dev/full" and code == 0
        assert done.returncode == (REFUSED if full else code), done
        assert "Traceback" not in done.stderr


def test_an_empty_word_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = "mnist-sample#0"
    for words in (
        ("inspect", ""), ("inspect", row, "--figure", ""), ("compare", row, ""),
        ("compare", "--matrix", ""), ("disguise", row, "--out", ""),
        ("fingerprint", row, "", row), ("fingerprint", row, "--search", ""),
        ("diff", row, row, "--with", ""),
        ("architectures", "--architecture", ""), ("zoo", "info", ""), ("zoo", "import", ""),
        ("train", "mnist-sample", "--out", ""), ("predict", "mnist-boosting", ""), ("report", ""),
        ("reproduce", "table1", "mnist-sample", "--out", ""), ("demo", "--out", ""),
    ):  # fmt: skip
        assert_refused("expected a path or name, found ''", *words)
    assert not list(tmp_path.iterdir())


def test_weights_whose_products_overflow_are_bad_input(tmp_path: Path) -> None:
    """Whichever decomposition or assignment meets numbers that are not finite."""
    large, usual = (write_example_checkpoint(tmp_path / str(seed), seed) for seed in range(2))
    file = large / "model.safetensors"
    save_file({name: w * 1e13 for name, w in load_file(file).items()}, file)
    for words in (("inspect", large), ("compare", large, usual), ("diff", usual, large)):
        done = tnfn(*words, "--json")
        assert done.returncode in VERDICTS | {REFUSED}
        json.loads(done.stdout, parse_constant=pytest.fail)


def test_names_that_are_no_utf_8_make_no_record_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"\xff")
    write_example_checkpoint(name)
    assert_refused("is not UTF-8 and cannot be written", "fingerprint", name, "--out", "x.parquet")
    shown = tnfn("fingerprint", name, "--json").stdout
    json.loads(shown)["fingerprints"][0]["name"].encode()
    assert os.listdir() == [name]


def command(*words: object) -> list[str]:
    """``tnfn`` in a process of its own."""
    return [sys.executable, "-m", "transformer_nfn", *map(str, words)]


@pytest.mark.parametrize(
    "words",
    [
        ("zoo", "rows", "mnist-sample"),  # a table, whose library would end with 1
        ("--help",),
    ],
)
def test_a_reader_that_goes_away_is_no_verdict(words: tuple[str, ...]) -> None:
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        shown = process.stderr.read()
        assert process.wait() == PIPE_CLOSED
    assert shown == b""


@pytest.mark.nightly
def test_an_output_in_ascii_gets_replacements() -> None:
    done = subprocess.run(
        command("zoo", "info", "mnist-sample"),
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "?" in done.stdout.decode("ascii")


def test_an_output_without_room_is_refused() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command("--help"), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == REFUSED
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [
        ("disguise", "mnist-sample#0", "--out", "new/net.safetensors"),
        ("disguise", "mnist-sample#0", "--out", "new/net.pt"),
        ("zoo", "export", "mnist-sample", "--out", "new/files"),
        ("zoo", "plot", "mnist-sample", "--out", "new/plot.png"),
    ],
)
def test_a_disk_without_room_is_refused_and_nothing_is_left(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk, but for its name
    try:
        done = tnfn(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.returncode == REFUSED
    assert done.stderr.startswith("error: 'new/")
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_into_a_zoo(tmp_path: Path) -> None:
    zoo, link = tmp_path / "zoo", tmp_path / "link"
    shutil.copytree(CHECKOUT / "mnist-sample", zoo)
    link.symlink_to(zoo)
    before = sorted(zoo.rglob("*"))
    for place in (zoo, zoo / "run", link / "run"):
        for words in (
            ("train", zoo, "--model", "statnn", "--epochs", 1, "--seeds", 1),
            ("zoo", "export", zoo),
        ):
            done = tnfn(*words, "--out", place)
            assert done.returncode == REFUSED
            assert f"lies in the zoo '{zoo}'" in done.stderr
    assert sorted(zoo.rglob("*")) == before


@pytest.mark.nightly
def test_an_interrupted_build_says_so_once(tmp_path: Path) -> None:
    """Ctrl-C of a terminal reaches the workers too."""
    words = ("--runs", 16, "--epochs", 100_000, "--shard-runs", 8, "--workers", 2)
    with subprocess.Popen(
        command("zoo", "build", "--out", tmp_path / "zoo", *words, "--path", "torch"),
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A process in the background of a shell would ignore it, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        locks = [tmp_path / "zoo" / "claims" / f"0000{i}.lock" for i in range(2)]
        while not all(lock.exists() for lock in locks) and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        shown = process.stderr.read().splitlines()
        assert process.wait() == INTERRUPTED
    assert shown == ["steps by plain PyTorch on cpu", "interrupted"]


@pytest.mark.parametrize("module", ["typer", "rich", "transformer_nfn.cli.app"])
def test_ctrl_c_while_modules_are_imported_is_one_word(module: str, tmp_path: Path) -> None:
    """Python would end by the signal after an interrupt inside of `exec`, which imports call."""
    hook = f"""
import sys
class Interrupts:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            exec("raise KeyboardInterrupt")
sys.meta_path.insert(0, Interrupts())
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    done = subprocess.run(
        command("--help"),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (INTERRUPTED, "interrupted\n")


def test_an_import_that_fails_is_explained(tmp_path: Path) -> None:
    """Also what goes wrong before a command is chosen."""
    (tmp_path / "rich.py").write_text("raise ImportError('half installed')")
    done = subprocess.run(
        [sys.executable, "-m", "transformer_nfn", "compare", "a", "b"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == INTERNAL_FAULT
    assert "half installed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_installed_command_exits_with_2() -> None:
    done = subprocess.run(
        command("compare", "none", "none"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no file 'none'\n"
