"""What a build tells whoever watches: shards done, networks and epochs trained, crashes."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of a build as it goes."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """``runs`` there are, ``done`` of them already; ``work`` network-epochs are left."""

    def trained(self, network_epochs: int) -> None:
        """So many networks did one more epoch each."""

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard is on disk."""

    def note(self, text: str) -> None:
        """Something a user should know."""


class Silent:
    """Says nothing."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """Says nothing."""

    def trained(self, network_epochs: int) -> None:
        """Says nothing."""

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """Says nothing."""

    def note(self, text: str) -> None:
        """Says nothing."""
