"""What can be wrong with a zoo, its data or its files."""

from __future__ import annotations

from transformer_nfn.errors import TransformerNFNError


class ZooError(TransformerNFNError):
    """Anything a user of the zoo can get wrong."""


class DataError(ZooError):
    """A task's data: missing, corrupt, of the wrong shape."""


class StoreError(ZooError):
    """A zoo folder: not one, another one, newer, damaged, or not writable."""


class ImportFileError(ZooError):
    """A foreign file that is not what its layout promises."""


def missing_extra(package: str, extra: str, purpose: str) -> ZooError:
    """The error for a package that was not installed, naming the extra that brings it."""
    return ZooError(
        f"{purpose} needs '{package}', which is not installed: "
        f"pip install 'transformer-nfn[{extra}]'"
    )
