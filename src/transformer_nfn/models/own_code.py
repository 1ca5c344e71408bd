"""Classes of users: how they are named, where their code lies, and when it may run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_nfn.errors import RunError
from transformer_nfn.io.files import file_sha256

REFERENCE = re.compile(r"(?P<module>.+):(?P<name>[^\W\d]\w*)")
SHOWN = 12
"""Characters of a digest that a sentence shows."""


@dataclass(frozen=True)
class Code:
    """Where a class comes from.

    Attributes:
        reference: how it is named, ``own.py:SetEncoder`` or ``package.module:SetEncoder``.
        file: that holds it; empty where it was typed into an interpreter.
        sha256: of the file.
        version: of the package that it is installed with, if any.
    """

    reference: str
    file: str = ""
    sha256: str = ""
    version: str = ""

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.reference.rpartition(":")[2]

    @staticmethod
    def of(cls: type, reference: str = "") -> Code:
        """Where a class comes from; its reference is made from its module unless it is given."""
        try:
            file = inspect.getsourcefile(cls) or ""
        except (TypeError, OSError):
            file = ""
        path = Path(file)
        if not path.is_file():  # a cell of a notebook
            return Code(reference or f"{cls.__module__}:{cls.__qualname__}")
        package = cls.__module__.partition(".")[0]
        try:
            version = metadata.version(package)
        except (metadata.PackageNotFoundError, ValueError):
            version = ""
        where = str(path) if cls.__module__ == "__main__" else cls.__module__
        reference = reference or f"{where}:{cls.__qualname__}"
        return Code(reference, str(path.resolve()), file_sha256(path), version)

    def check_unchanged(self) -> None:
        """Refuse a file that is gone, or another one than was recorded."""
        again = f"name the class again with --model {self.reference}"
        if not self.file:
            raise RunError(
                f"the class {self.name} was typed into an interpreter: its code is in no file, so "
                "only that process can use it"
            )
        if not Path(self.file).is_file():
            raise RunError(f"'{self.file}', the file of the class {self.name}, is gone: {again}")
        if (found := file_sha256(Path(self.file))) != self.sha256:
            raise RunError(
                f"'{self.file}' was changed since the training (sha256 {self.sha256[:SHOWN]} then, "
                f"{found[:SHOWN]} now): {again} to accept it"
            )


def import_own(reference: str) -> Any:
    """Import what a reference names: ``FILE.py:NAME`` or ``MODULE:NAME``. This runs its code."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise RunError(f"'{reference}' expected FILE.py:CLASS or MODULE:CLASS")
    where, name = match["module"], match["name"]
    module = _module_of_file(Path(where)) if where.endswith(".py") else _module_named(where)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items()
                 if isinstance(value, type) and value.__module__ == module.__name__]  # fmt: skip
        listed = f"it has {', '.join(known)}" if known else "it has no class"
        raise RunError(f"'{where}' has no '{name}': {listed}")
    return getattr(module, name)


def package_folder(name: str) -> Path | None:
    """Folder, or file, that a module would be imported from; nothing of it runs."""
    with _beside(str(Path.cwd())):
        spec = PathFinder.find_spec(name.partition(".")[0])
    if spec is None:
        return None
    inner = [*(spec.submodule_search_locations or ())]
    return Path(inner[0] if inner else spec.origin or "").resolve()


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RunError(f"there is no file '{path}'")
    name = f"own_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:SHOWN]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RunError(f"'{path}' expected a file of Python code")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _beside(str(path.resolve().parent)), own_code(str(path), "while it was imported", path):
        spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> ModuleType:
    with _beside(str(Path.cwd())), own_code(name, "while it was imported"):
        return importlib.import_module(name)


@contextlib.contextmanager
def _beside(folder: str) -> Iterator[None]:
    """A folder from which modules can be imported, besides the usual places."""
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def own_code(what: str, when: str, file: Path | str = "") -> Iterator[None]:
    """Run a user's code: what it prints goes to stderr, what it raises becomes a sentence.

    Args:
        what: the class or file.
        when: which of its methods runs.
        file: that holds it, to name the line.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except RunError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if file and Path(frame.filename) == Path(file)]
        line = f" at line {own[-1].lineno} of '{Path(file).name}'" if own else ""
        told = traceback.TracebackException.from_exception(error)  # its text may raise, too
        text = " ".join(str(told).split()) or "without a message"
        raise RunError(f"'{what}' raised {type(error).__name__} {when}{line}: {text}") from error
