"""Lazy mapping of the tensors that a file or folder holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.io.errors import CheckpointError, MissingTensorError
from transformer_nfn.io.foreign import StateDict
from transformer_nfn.io.hub_folder import INDEX, find_weights, read_config, read_shard_index
from transformer_nfn.io.open_files import OpenFiles
from transformer_nfn.io.other_formats import check_format
from transformer_nfn.io.safetensors_file import SafetensorsFile
from transformer_nfn.io.source import WEIGHT_DTYPES, TensorInfo, TensorSource
from transformer_nfn.io.wrappers import common_wrappers

STATE_DICTS = (".pt", ".pth", ".bin")


class Checkpoint(OpenFiles, Mapping[str, Tensor]):
    """Tensors by name, lazily: names, shapes and dtypes are known, a tensor is read when asked.

    ``checkpoint[name]`` is a new tensor on the CPU in the file's own dtype, read from the file
    each time, so that walking a large network takes the memory of one tensor.

    Attributes:
        where: what errors call it.
        metadata: what a safetensors file says of itself.
        config: what ``config.json`` of a folder says.
    """

    def __init__(
        self, where: str, source: TensorSource, config: Mapping[str, Any] | None = None
    ) -> None:
        self.where = where
        self.metadata = source.metadata
        self.config: Mapping[str, Any] = {} if config is None else config
        self._source = source
        self._infos = source.infos
        self._closed = False

    @staticmethod
    def open(path: str | Path, *, where: str | None = None) -> Checkpoint:
        """Opens a file or folder; reads no weights, and never runs code that a file holds.

        Rows of a zoo and names are opened by `transformer_nfn.zoo.checkpoints.open_checkpoint`,
        which comes here for everything else.

        Args:
            path: a ``.safetensors`` file, a state dict (``.pt``, ``.pth``, ``.bin``), an index
                of shards (``….index.json``), or a folder as model hubs lay it out.
            where: what errors call it; its path if not given.
        """
        path = Path(path)
        where = str(path) if where is None else where
        check_format(path, where)
        if path.is_dir():
            return Checkpoint(where, _open_source(find_weights(path)), read_config(path))
        if not path.is_file():
            raise CheckpointError(f"there is no file '{where}'")
        return Checkpoint(where, _open_source(path, where))

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, without reading it."""
        try:
            return self._infos[name]
        except KeyError:
            raise MissingTensorError(f"'{self.where}' holds no tensor '{name}'") from None

    def __getitem__(self, name: str) -> Tensor:
        info = self.info(name)
        if self._closed:
            raise CheckpointError(f"'{self.where}' was closed before '{name}' was read")
        if info.weight_dtype is None:
            raise CheckpointError(
                f"'{self.where}': '{name}' holds {info.dtype}, weights are "
                f"{', '.join(WEIGHT_DTYPES)}"
            )
        return self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __repr__(self) -> str:
        return f"Checkpoint('{self.where}', {len(self)} tensors)"

    def part(self, prefix: str) -> Checkpoint:
        """The tensors whose names begin with ``prefix.``, under the rest of their names.

        It shares this checkpoint's files: closing either closes both.
        """
        infos = {
            name.removeprefix(f"{prefix}."): info
            for name, info in self._infos.items()
            if name.startswith(f"{prefix}.")
        }
        if not infos:
            raise CheckpointError(f"'{self.where}' holds no tensors named '{prefix}.…'")
        return Checkpoint(f"{self.where}, {prefix}", _Part(self, prefix, infos), self.config)

    def unwrapped(self) -> Checkpoint:
        """The same tensors without what wraps all their names, such as ``module.``.

        It shares this checkpoint's files: closing either closes both.
        """
        wrapper = common_wrappers(self)[-1]
        if not wrapper:
            return self
        infos = {name.removeprefix(wrapper): info for name, info in self._infos.items()}
        source = _Part(self, wrapper.removesuffix("."), infos, self.metadata)
        return Checkpoint(self.where, source, self.config)

    def close(self) -> None:
        """Closes the files; tensors that were read stay."""
        self._closed = True
        self._source.close()


def check_no_nan(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a tensor that holds NaN."""
    if bool(torch.isnan(checkpoint[name]).any()):
        raise CheckpointError(f"'{checkpoint.where}': '{name}' expected numbers, found NaN")


def _open_source(path: Path, where: str | None = None) -> TensorSource:
    return _Shards(path) if path.name.endswith(INDEX) else _open_file(path, where)


def _open_file(path: Path, where: str | None = None) -> TensorSource:
    return StateDict(path, where) if is_state_dict(path) else SafetensorsFile(path, where)


def is_state_dict(path: Path) -> bool:
    """Whether a file is opened as what ``torch.save`` wrote, not as safetensors."""
    return path.suffix in STATE_DICTS or (path.suffix != ".safetensors" and _is_torch(path))


def _is_torch(path: Path) -> bool:
    """Whether a file without a telling name begins as what ``torch.save`` writes."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False  # whoever opens it next says why
    return head in (b"PK", b"\x80\x02")


class _Shards:
    """Files with an index that says which of them holds a tensor; see `TensorSource`."""

    def __init__(self, index: Path) -> None:
        files = read_shard_index(index)
        self._open: dict[Path, TensorSource] = {}
        self._at: dict[str, TensorSource] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        try:
            for path in dict.fromkeys(files.values()):
                self._open[path] = _open_file(path)
                self.metadata |= self._open[path].metadata
            for name, path in files.items():
                shard = self._open[path]
                if name not in shard.infos:
                    raise CheckpointError(
                        f"'{index}' says that tensor '{name}' is in '{path.name}', where it is not"
                    )
                self._at[name], self.infos[name] = shard, shard.infos[name]
        except CheckpointError:
            self.close()
            raise

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._at[name].read(name)

    def close(self) -> None:
        """Closes every shard."""
        for shard in self._open.values():
            shard.close()


class _Part:
    """Some tensors of another checkpoint, under shorter names; see `TensorSource`."""

    def __init__(
        self,
        whole: Checkpoint,
        prefix: str,
        infos: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._whole, self._prefix = whole, prefix
        self.infos = infos
        self.metadata = {} if metadata is None else metadata  # what is said of this part

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._whole[f"{self._prefix}.{name}"]

    def close(self) -> None:
        """Closes the whole."""
        self._whole.close()
