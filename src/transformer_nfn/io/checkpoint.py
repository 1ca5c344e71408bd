"""Lazy mapping of the tensors that a file or folder holds, and the formats that are rejected."""

from __future__ import annotations

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError, MissingTensorError
from transformer_nfn.io.files import file_sha256, open_regular
from transformer_nfn.io.gguf_file import MAGIC, GgufFile
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.io.onnx_file import OnnxFile
from transformer_nfn.io.packed_weights import QUANTISED, quantisation, with_packed
from transformer_nfn.io.scaled_weights import with_scales
from transformer_nfn.io.tensor_files import (
    WEIGHT_DTYPES,
    QuantisedSource,
    SafetensorsFile,
    StateDict,
    TensorInfo,
    TensorSource,
    closed_on_error,
    common_wrappers,
    inside,
    open_handle,
)

STATE_DICTS = (".pt", ".pth", ".bin")
CONFIG = "config.json"
MODULES = "modules.json"
LARGEST_MODULES = 1 << 20
POOLING = re.compile("pooling_mode_(.*?)(_tokens?)?$")
SENTENCE_POOLING = "sentence_pooling"
INDEX = ".index.json"
# In the order in which they are preferred.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
PLAIN = "plain weights in float64, float32, float16 or bfloat16"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
ADAPTER_WORDS = "an adapter (LoRA), which changes another model's weights"
LARGEST = 1e15
"""Magnitude that no trained weight has: the squares of a whole tensor add up in float32."""
GGUF = ".gguf"
ONNX = ".onnx"
WEIGHT_FILES = (".safetensors", *STATE_DICTS, ".ckpt", GGUF, ONNX)
FOLDER_MARKS = (CONFIG, *(name for name in WEIGHTS if name.endswith(INDEX)), ADAPTER[0])
"""Files that make a folder one checkpoint."""
# An ONNX file is a protobuf message: its version (field 1, a small number), then the name and
# version of its producer, a domain, a text, the graph or the operators (fields 2 to 8).
ONNX_VERSION, ONNX_VERSIONS = 0x08, range(1, 32)
ONNX_FIELDS = (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42)

# Names of tensors that only such a checkpoint has, after texts of which one stands in each name.
BY_NAME = (
    (("lora", "base_"), r"(^|\.)lora_|\.lora\.|(^|\.)base_model\.model\.", "an adapter (LoRA)"),
    (
        ("qweight", "qzeros", "g_idx"),
        r"\.(qweight|qzeros|g_idx)$",
        "weights quantised by GPTQ or AWQ",
    ),
    (
        ("absmax", "quant_", "SCB", "_format"),
        r"\.(absmax|quant_map|SCB|weight_format|quant_state\..+)$",
        "weights quantised by bitsandbytes",
    ),
    (
        ("_scale", "_packed"),
        r"\.(weight_scale|weight_scale_inv|input_scale|weight_packed)$",
        "weights quantised with scales",
    ),
)


class OpenFiles(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Close the files; tensors that were read stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Checkpoint(OpenFiles, Mapping[str, Tensor]):
    """Lazy mapping of tensors by name: shapes and dtypes are known, a tensor is read on access.

    ``checkpoint[name]`` is a new tensor on the CPU in the file's own dtype, read from the file
    each time, so that iterating over a large network takes the memory of one tensor.

    Attributes:
        where: name in errors.
        infos: shape and dtype of every tensor by name.
        metadata: of a safetensors file.
        config: ``config.json`` of a folder, see `read_config`; the metadata of a GGUF file.
        converted: tensors are computed from what the files hold, which are of another format; it
            is written as a folder of safetensors.

    >>> from transformer_nfn.io.tensor_files import write_tensors
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "net.safetensors"
    >>> write_tensors(file, {"W": torch.zeros(2, 3)})
    >>> with Checkpoint.open(file) as checkpoint:
    ...     checkpoint.info("W").shape, checkpoint["W"].sum()
    ((2, 3), tensor(0.))
    """

    def __init__(
        self,
        where: str,
        source: TensorSource,
        config: Mapping[str, Any] | None = None,
        *,
        converted: bool = False,
    ) -> None:
        self.where, self.converted = where, converted
        self.metadata = source.metadata
        self.config: Mapping[str, Any] = {} if config is None else config
        self._source = source
        self.infos: Mapping[str, TensorInfo] = source.infos
        self._closed = False

    @staticmethod
    def open(path: str | Path, *, where: str | None = None) -> Checkpoint:
        """Open a file or folder; reads no weights, and never runs code in a file.

        Args:
            path: a ``.safetensors`` file, a state dict (``.pt``, ``.pth``, ``.bin``), an index
                of shards (``….index.json``), a ``.gguf`` file, or a folder as model hubs lay it
                out.
            where: name in errors; its path if not given.
        """
        path = Path(path)
        where = str(path) if where is None else where
        if path.is_dir():
            weights, config = find_weights(path, where), read_config(path)
            source = open_source(weights, str(weights))
        elif path.is_file() and path.name in ADAPTER:
            refuse(where, ADAPTER_WORDS)
        elif os.path.lexists(path):
            source, config = open_source(path, where), {}
            if isinstance(source, OnnxFile):
                config = read_config(path.parent)
        else:
            raise CheckpointError(f"there is no file '{where}'")
        if isinstance(source, GgufFile):
            return Checkpoint(where, source, source.fields)
        if isinstance(source, OnnxFile):
            return Checkpoint(where, source, config, converted=True)
        return Checkpoint.of(source, config, where)

    @staticmethod
    def of(source: TensorSource, config: Mapping[str, Any], where: str) -> Checkpoint:
        """The tensors of a source, unpacked and scaled as the config says."""
        read = with_scales(with_packed(source, config, where), config, where)
        if read is source:
            return Checkpoint(where, source, config)
        plain = {name: value for name, value in config.items() if name != QUANTISED}
        return Checkpoint(where, read, plain, converted=True)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, without reading it."""
        try:
            return self.infos[name]
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

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Lowest and highest number that the format of a tensor rounds to each stored one.

        None where the format does not round weights one by one, or the tensor is not quantised.
        """
        if not self.info(name).quantised or not isinstance(self._source, QuantisedSource):
            return None
        return self._source.interval(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def __repr__(self) -> str:
        return f"Checkpoint('{self.where}', {len(self)} tensors)"

    def part(self, prefix: str) -> Checkpoint:
        """The tensors whose names begin with ``prefix.``, under the rest of their names.

        It shares this checkpoint's files: closing either closes both.
        """
        source = _Part(self, f"{prefix}.", {})
        if not source.infos:
            raise CheckpointError(f"'{self.where}' holds no tensors named '{prefix}.…'")
        return Checkpoint(f"{self.where}, {prefix}", source, self.config)

    def unwrapped(self) -> Checkpoint:
        """The same tensors without a prefix of all names, such as ``module.``.

        It shares this checkpoint's files: closing either closes both.
        """
        wrapper = common_wrappers(self)[-1]
        if not wrapper:
            return self
        return Checkpoint(self.where, _Part(self, wrapper, self.metadata), self.config)

    def close(self) -> None:
        """Close the files; tensors that were read stay."""
        self._closed = True
        self._source.close()


def check_numbers(weights: Tensor, where: str) -> None:
    """Refuse NaN, infinity and numbers above `LARGEST`; ``where`` names the tensor in the error."""
    size = max(abs(float(x)) for x in torch.aminmax(weights)) if weights.numel() else 0.0
    if not size <= LARGEST:
        found = f"{size:.3g}, above {LARGEST:g}" if math.isfinite(size) else "NaN or infinity"
        raise CheckpointError(f"{where} expected numbers, found {found}")


def check_no_nan(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a tensor that holds NaN."""
    if bool(torch.isnan(checkpoint[name]).any()):
        raise CheckpointError(f"'{checkpoint.where}': '{name}' expected numbers, found NaN")


def open_source(path: Path, where: str) -> TensorSource:
    """Open a file of weights, or the shards of an index."""
    return _Shards(path) if path.name.endswith(INDEX) else _open_file(path, where)


def _open_file(path: Path, where: str) -> TensorSource:
    os.close(open_handle(path, where))  # a reader would wait for the end of a pipe
    source = reader_of(path)(path, where)
    with closed_on_error(source.close):
        check_names(source.infos, where)
    return source


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse tensors whose names are empty or no text in UTF-8."""
    try:
        "".join(names).encode()
    except UnicodeError as error:
        raise CheckpointError(f"'{where}': a tensor's name is not UTF-8 ({error})") from error
    if "" in names:
        raise CheckpointError(f"'{where}' holds a tensor whose name is empty")


def reader_of(path: Path) -> Callable[[Path, str], TensorSource]:
    """What reads a file of weights, by its suffix or its first bytes."""
    suffix, head = path.suffix.lower(), _head(path)
    if suffix == GGUF or head[:4] == MAGIC:
        return GgufFile
    if suffix == ONNX or _is_onnx(head):
        return OnnxFile
    saved = path.suffix != ".safetensors" and head[:2] in (b"PK", b"\x80\x02")
    return StateDict if saved or path.suffix in STATE_DICTS else SafetensorsFile


def _is_onnx(head: bytes) -> bool:
    if len(head) < 9 or head[8:] == b"{" or head[0] != ONNX_VERSION:  # safetensors has a brace
        return False
    return head[1] in ONNX_VERSIONS and head[2] in ONNX_FIELDS


def _head(path: Path) -> bytes:
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(9)
    except OSError:
        return b""  # the reader of the file reports why


class _Shards:
    """Shards with an index of their tensors; see `TensorSource`."""

    def __init__(self, index: Path) -> None:
        self._files = read_shard_index(index)
        self._open: dict[Path, TensorSource] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        with closed_on_error(self.close):
            for path in dict.fromkeys(self._files.values()):
                self._open[path] = _open_file(path, str(path))
                self.metadata |= self._open[path].metadata
            for name, path in self._files.items():
                shard = self._open[path]
                if name not in shard.infos:
                    raise CheckpointError(
                        f"'{index}' says that tensor '{name}' is in '{path.name}', where it is not"
                    )
                self.infos[name] = shard.infos[name]

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._open[self._files[name]].read(name)

    def close(self) -> None:
        """Closes every shard."""
        for shard in self._open.values():
            shard.close()


class _Part:
    """The tensors of another checkpoint with a prefix, without it; see `TensorSource`."""

    def __init__(self, whole: Checkpoint, prefix: str, metadata: Mapping[str, str]) -> None:
        self._whole, self._prefix, self.metadata = whole, prefix, metadata
        self.infos = {
            name.removeprefix(prefix): whole.info(name)
            for name in whole
            if name.startswith(prefix)
        }

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._whole[self._prefix + name]

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """See `QuantisedSource`."""
        return self._whole.interval(self._prefix + name)

    def close(self) -> None:
        """Closes the whole."""
        self._whole.close()


def find_weights(folder: Path, where: str) -> Path:
    """The file of a folder that holds its weights, or the index of those that do.

    Args:
        folder: as model hubs lay it out; an adapter is refused, unless other weights are there.
        where: its name in errors.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.glob(f"*/*{ONNX}")]
    chosen = choose_weights([*os.listdir(folder), *names], where)
    if chosen is not None:
        return inside(folder, chosen, folder)
    networks = sorted(path for path in folder.iterdir() if _is_network(path))
    if networks:
        raise CheckpointError(
            f"'{folder}' is a folder of networks, and no network: name one, such as "
            f"'{networks[0]}', or for `tnfn predict` all of them as '{folder}/*'"
        )
    raise CheckpointError(f"'{folder}' holds no weights: expected {' or '.join(WEIGHTS[:3])}")


def choose_weights(names: Iterable[str], where: str) -> str | None:
    """Which of the files of a folder holds its weights, or the index of those that do.

    Args:
        names: of the folder, and of ONNX files in folders below.
        where: the folder's name in errors, ``hf:org/name:`` of a repository.
    """
    held, place = set(names), where if where.endswith(":") else f"{where.rstrip('/')}/"
    for name in WEIGHTS:
        if name in held:
            return name
    converted = {
        suffix: sorted(name for name in held if name.endswith(suffix) and "/" not in name)
        for suffix in (GGUF, ONNX)
    }
    adapter = next((name for name in ADAPTER if name in held), None)
    if adapter is not None and not converted[GGUF]:
        refuse(f"{place}{adapter}", ADAPTER_WORDS)
    for suffix, files in converted.items():
        if len(files) == 1:
            return files[0]
        if files:
            raise CheckpointError(
                f"'{where}' holds {len(files)} {suffix[1:].upper()} files: name one of them, such "
                f"as '{place}{files[0]}'"
            )
    below = sorted(name for name in held if name.endswith(ONNX))
    if below:
        raise CheckpointError(
            f"'{where}' holds no weights but ONNX in folders below: name a file, as in "
            f"'{place}{below[0]}'"
        )
    return None


def _is_network(path: Path) -> bool:
    if path.is_dir():
        return any(os.path.lexists(path / name) for name in (*WEIGHTS, ADAPTER[0]))
    return path.name.endswith(WEIGHT_FILES)


def checkpoint_paths(folder: Path) -> Iterator[Path]:
    """Files and folders that look like checkpoints below a folder, to any depth.

    Hidden ones and links to folders are left out.
    """
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        path = Path(where)
        if path != folder and any(mark in files for mark in FOLDER_MARKS):
            folders.clear()
            yield path
        else:
            visible = (name for name in files if not name.startswith("."))
            yield from (path / name for name in visible if name.endswith(WEIGHT_FILES))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder, empty if there is none.

    What a sentence transformer does to the outputs of the model stands in folders of its modules
    and is added to it, but for a normalisation.
    """
    path = folder / CONFIG
    config = read_object(path) if os.path.lexists(path) else {}
    words = []
    for module, kind in sentence_modules(folder).items():
        if kind.endswith("Pooling") and os.path.lexists(folder / module / CONFIG):
            stated = read_object(inside(folder, f"{module}/{CONFIG}", folder))
            modes = [name for name, on in stated.items() if POOLING.match(name) and on is True]
            modes = modes or [str(stated.get("pooling_mode"))]
            words.append("+".join(POOLING.sub(r"\1", mode) for mode in modes))
        for name in WEIGHTS:
            if os.path.lexists(folder / module / name):
                path = inside(folder, f"{module}/{name}", folder)
                words.append(f"{kind.rpartition('.')[2]} {file_sha256(path)[:8]}")
                break
    return config | {SENTENCE_POOLING: ", ".join(words)} if words else config


def sentence_modules(folder: Path) -> dict[str, str]:
    """The kinds of the modules of a sentence transformer after the model, by their folders."""
    path = folder / MODULES
    if not os.path.lexists(path):
        return {}
    with open(open_handle(inside(folder, MODULES, folder), str(path)), "rb") as file:
        text = file.read(LARGEST_MODULES)
    try:
        listed = json.loads(text)
        return {str(module["path"]): str(module.get("type")) for module in listed if module["path"]}
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return {}


def read_shard_index(index: Path) -> dict[str, Path]:
    """The file of each tensor; rejects paths out of the folder of the index."""
    names = shard_names(index)
    found = {shard: inside(index.parent, shard, index) for shard in dict.fromkeys(names.values())}
    return {name: found[shard] for name, shard in names.items()}


def shard_names(index: Path) -> dict[str, str]:
    """The name of the file of each tensor, unchecked."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"'{index}' is not an index of shards: it has no 'weight_map'")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"'{index}': the file of tensor '{name}' is not named by text")
    return weight_map


def check_plain(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Refuse quantised weights and adapters by their config and the names of their tensors."""
    if isinstance(config.get(QUANTISED), Mapping):
        method = quantisation(config).get("quant_method", "an unnamed method")
        refuse(f"{where}': '{QUANTISED}", f"weights quantised by {str(method)[:60]}")
    keys = list(keys)
    text = "\n".join(keys)
    for parts, pattern, what in BY_NAME:
        if any(part in text for part in parts):  # of 100,000 names few have any of them
            key = next(filter(re.compile(pattern).search, keys), None)
            if key is not None:
                refuse(f"{where}': '{key}", what)


def refuse(where: str, found: str) -> NoReturn:
    """Raise the error that names what was found."""
    raise CheckpointError(f"'{where}' expected {PLAIN} of a dense transformer, found {found}")
