"""What holds files open? Something that is closed when the ``with`` block it is used in ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class OpenFiles(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Closes the files; tensors that were read stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
