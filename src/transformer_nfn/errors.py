"""The errors a user can cause, each a single sentence that says what to change."""

from __future__ import annotations


class TransformerNFNError(ValueError):
    """Any input that this library refuses; the command line turns it into exit code 2."""


class SpaceError(TransformerNFNError):
    """A weight space that contradicts itself, or weights that do not lie in the space."""


class GroupError(TransformerNFNError):
    """A group element that does not exist: singular, ill-conditioned, or of another space."""
