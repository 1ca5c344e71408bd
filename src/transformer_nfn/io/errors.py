"""What can be wrong with a file that somebody hands in, or with one that should be fetched."""

from __future__ import annotations

from transformer_nfn.errors import TransformerNFNError


class CheckpointError(TransformerNFNError):
    """A file or folder of weights: missing, damaged, unsafe, or not what is asked of it."""


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
