"""The errors a user can cause, each a single sentence that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TransformerNFNError(ValueError):
    """Any input that this library refuses; the command line turns it into exit code 2.

    Attributes:
        lines: text to copy that follows the sentence, such as a file to write.
    """

    lines: tuple[str, ...] = ()


class SpaceError(TransformerNFNError):
    """A weight space that contradicts itself, or weights that do not lie in the space."""


class GroupError(TransformerNFNError):
    """A group element that does not exist: singular, ill-conditioned, or of another space."""


class CheckpointError(TransformerNFNError):
    """A file or folder of weights: missing, damaged, unsafe, or of another kind than expected."""


class MissingTensorError(CheckpointError, KeyError):
    """A name that a checkpoint does not hold; a `KeyError`, as a mapping must raise."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show the sentence in quotes


class WriteError(TransformerNFNError):
    """A file that cannot be written: no permission, no room, no such place."""


class DownloadError(TransformerNFNError):
    """A file that is not where it should be, cannot be fetched, or has another checksum."""


class AssetError(TransformerNFNError):
    """A name that stands for nothing, or an asset that is missing, damaged or out of reach."""


class RunError(TransformerNFNError):
    """A run folder that cannot be read, or an experiment that cannot be run."""


@contextmanager
def needs_extra(
    kind: type[TransformerNFNError], package: str, extra: str, purpose: str
) -> Iterator[None]:
    """Around imports of a package that may not be installed: the error names its extra."""
    try:
        yield
    except ImportError as error:
        raise kind(
            f"{purpose} needs '{package}', which is not installed: "
            f"pip install 'transformer-nfn[{extra}]'"
        ) from error
