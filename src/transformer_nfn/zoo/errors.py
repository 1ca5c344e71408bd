"""What can be wrong with a zoo, its data or its files."""

from __future__ import annotations

from transformer_nfn.errors import TransformerNFNError


class ZooError(TransformerNFNError):
    """Anything a user of the zoo can get wrong."""


class DataError(ZooError):
    """A task's data: missing, corrupt, of the wrong shape."""


class StoreError(ZooError):
    """A zoo folder: not one, another one, newer, or damaged."""


class ImportFileError(ZooError):
    """A foreign file that is not what its layout promises."""
