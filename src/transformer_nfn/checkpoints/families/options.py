"""Statements of a user about checkpoints, where their files do not say enough."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformer_nfn.errors import TransformerNFNError


@dataclass(frozen=True)
class OpenOptions:
    """How to open a checkpoint whose family or config its files do not state.

    Attributes:
        architecture: a data file of a family of one's own, see ``docs/families.md``.
        family: the name of a known family, such as ``bert``; skips recognition.
        settings: config fields, which take precedence over those of ``config.json``.
    """

    architecture: Path | None = None
    family: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.architecture is not None and self.family is not None:
            raise TransformerNFNError(
                f"--architecture '{self.architecture}' and --family '{self.family}' both choose a "
                "family: give one of them"
            )

    def __bool__(self) -> bool:
        """Whether anything is stated."""
        return self != OpenOptions()

    def __str__(self) -> str:
        """The options as a command line has them."""
        words = []
        if self.architecture is not None:
            words += ["--architecture", str(self.architecture)]
        if self.family is not None:
            words += ["--family", self.family]
        for name, value in self.settings.items():
            words += ["--set", f"{name}={as_setting(value)}"]
        return shlex.join(words)

    def absolute(self) -> OpenOptions:
        """The same for a process with another working directory."""
        if self.architecture is None:
            return self
        return replace(self, architecture=self.architecture.resolve())


def as_setting(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
