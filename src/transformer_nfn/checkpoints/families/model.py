"""An open checkpoint of a known family: its description, and its tensors under canonical names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families.binding import Binding, bind
from transformer_nfn.checkpoints.families.describe import describe
from transformer_nfn.checkpoints.families.expressions import shown
from transformer_nfn.checkpoints.families.family import known_family, read_family
from transformer_nfn.checkpoints.families.gguf import as_hub
from transformer_nfn.checkpoints.families.recognise import (
    OpenOptions,
    check_no_mixture,
    recognise,
)
from transformer_nfn.errors import CheckpointError, DownloadError, MissingTensorError
from transformer_nfn.functional.description import Transformer
from transformer_nfn.io.adapter import BASE_FIELD, Adapter, adapted
from transformer_nfn.io.checkpoint import (
    Checkpoint,
    OpenFiles,
    check_no_nan,
    check_numbers,
    check_plain,
)
from transformer_nfn.io.gguf_file import ARCHITECTURE
from transformer_nfn.io.layout import file_shape, take
from transformer_nfn.io.location import Location
from transformer_nfn.io.tensor_files import closed_on_error

TURNED = ("W_Q", "b_Q", "W_K", "b_K", "q_norm.g", "k_norm.g")
"""Tensors whose last axis rotary positions turn."""


class Model(OpenFiles):
    """A checkpoint of a known family: tensors by canonical name, read on access.

    Attributes:
        description: the transformer, without its weights.
        names: shape of each tensor by canonical name, in the order of the network.
        checkpoint: the file.
        binding: which tensor of the file holds what.
        where: what errors call the file.
        config: what ``config.json`` says.
        path: the file or folder.
        options: how it was opened, and how a copy of it opens.
    """

    def __init__(
        self, checkpoint: Checkpoint, binding: Binding, path: Path, options: OpenOptions
    ) -> None:
        self.checkpoint, self.binding, self.path = checkpoint, binding, path
        self.options = options
        self.where, self.config = checkpoint.where, checkpoint.config
        self.description: Transformer = describe(binding, self.where)
        self.names: Mapping[str, tuple[int, ...]] = self.description.tensors
        _check_frequencies(checkpoint, self.description)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights; single tensors may have others."""
        counts: dict[torch.dtype, int] = {}
        for key, entry in self.binding.entries.items():
            dtype = self.checkpoint.info(key).weight_dtype
            assert dtype is not None
            counts[dtype] = counts.get(dtype, 0) + torch.Size(entry.shape).numel()
        return max(counts, key=lambda dtype: counts[dtype])

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, contiguous, in the file's dtype.

        Gains that a file stores less one come in float64, which holds them exactly.
        """
        return self.read([name])[name]

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Some tensors, each tensor of the file read once."""
        wanted = list(names)
        out: dict[str, Tensor] = {}
        for name in wanted:
            if name in self.binding.kept:
                out[name] = self._finite(self.binding.kept[name])
            elif name not in out:
                found = self._held(name)
                out |= {other: w for other, w in found.items() if other in wanted}
        return {name: out[name] if dtype is None else out[name].to(dtype) for name in wanted}

    def stored(self, name: str) -> Tensor:
        """One tensor in the numbers and the dtype of the file, also gains that it stores less one.
        """
        w, offset = self[name], self.binding.family.gain_offset
        if not offset or not name.endswith(".g"):
            return w
        return (w - offset).to(self.checkpoint.info(self.key(name)).weight_dtype)

    def format(self, name: str) -> str:
        """What a tensor is stored in: a dtype, or the format that it was quantised to."""
        info = self.checkpoint.info(self.key(name))
        return info.quantised or info.dtype

    def key(self, name: str) -> str:
        """The name in the file of the tensor that holds a canonical one."""
        if name in self.binding.kept:
            return self.binding.kept[name]
        if name not in self.binding.holders:
            raise MissingTensorError(f"'{self.where}' holds no tensor '{name}'")
        return self.binding.holders[name][0]

    def mapping(self) -> dict[str, str]:
        """Where each tensor stands in the file, by canonical name.

        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("model")) as model:
        ...     model.mapping()["0.W_Q"]
        'model.layers.0.self_attn.q_proj.weight'
        """
        found = {name: keys[0] for name, keys in self.binding.holders.items()}
        for key, entry in self.binding.entries.items():
            along, start = entry.slots[0].layout.joined, 0
            if along is None or len(entry.slots) == 1:
                continue
            for slot in entry.slots:
                stop = start + file_shape(self.binding.sizes, [slot])[along]
                found[slot.tensor] = f"{key}[{':, ' * along}{start}:{stop}]"
                start = stop
        return found | dict(self.binding.kept)

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Lowest and highest number that the format of a tensor rounds to each stored one.

        None where the format does not round weights one by one, or the tensor is not quantised.
        """
        key = self.key(name)
        found = self.checkpoint.interval(key)
        if found is None or name in self.binding.kept:
            return found
        low, high = (self._placed(key, end)[name] for end in found)
        return low, high

    def block(
        self, i: int, stack: str = "", dtype: torch.dtype = torch.float64
    ) -> dict[str, Tensor]:
        """The tensors of one block, by their names without its prefix."""
        prefix = f"{stack}{i}."
        names = [name for name in self.names if name.startswith(prefix)]
        read = self.read(names, dtype)
        return {name.removeprefix(prefix): w for name, w in read.items()}

    def check_numbers(self) -> None:
        """Refuse NaN in any tensor of the file, and infinity where it is a weight of the network.

        Buffers on which nothing acts, such as attention masks, may hold infinity.
        """
        for key in self.checkpoint:
            if key in self.binding.entries:
                self._finite(key)
            elif self.checkpoint.info(key).weight_dtype is not None:
                check_no_nan(self.checkpoint, key)

    def _held(self, name: str) -> dict[str, Tensor]:
        """What the tensor of the file that holds ``name`` holds."""
        first, others = self.key(name), self.binding.holders[name][1:]
        raw = self._finite(first)
        for other in others:
            if not torch.equal(raw, self._finite(other)):
                raise CheckpointError(
                    f"'{self.where}': '{first}' and '{other}' expected the same numbers, both "
                    f"hold '{name}', found different ones"
                )
        return self._placed(first, raw)

    def _placed(self, key: str, raw: Tensor) -> dict[str, Tensor]:
        """The tensors that one of the file holds."""
        entry = self.binding.entries[key]
        found = take(self.binding.sizes, raw.reshape(entry.plain), entry.slots)
        offset = self.binding.family.gain_offset
        if offset:
            found = {n: w.double() + offset if n.endswith(".g") else w for n, w in found.items()}
        order = self.pair_order
        if order is not None:
            found = {n: w[..., order] if n.endswith(TURNED) else w for n, w in found.items()}
        return found

    @cached_property
    def pair_order(self) -> Tensor | None:
        """Order in which a file with neighbouring rotary pairs is read, ``[d_k]``: the first of
        each pair, the second of each, and what is not rotated; None for other files."""
        if not self.binding.family.neighbours:
            return None
        attention = self.description.stacks[0].blocks[0].attention
        index = torch.arange(attention.d_k)
        turned, rest = index[: attention.rotary], index[attention.rotary :]
        return torch.cat([turned[::2], turned[1::2], rest])

    def _finite(self, key: str) -> Tensor:
        found = self.checkpoint[key]
        check_numbers(found, f"'{self.where}': '{key}'")
        return found

    def close(self) -> None:
        """Closes the files; tensors that were read stay."""
        self.checkpoint.close()

    def __repr__(self) -> str:
        return f"Model('{self.where}', {self.description.family}, {len(self.names)} tensors)"


def open_model(path: str | Path | Location, options: OpenOptions | None = None) -> Model:
    """Open a checkpoint of a known family; reads its config and headers, no weights.

    Where nothing states whether the output matrix is the token embedding, both are read.

    Args:
        path: a file or folder, as `Checkpoint.open` takes it, or a repository of a hub:
            ``org/name`` or ``hf:org/name@revision:subfolder``, of which the files that are needed
            are fetched.
        options: what its files do not state; without a family in them it is recognised by
            ``config.json``, or by the names of the tensors.
    """
    options = OpenOptions() if options is None else options
    location = Location.of(path)
    checkpoint = _open_adapted(location, options) if location.is_adapter else open_files(location)
    return read_model(checkpoint, location.checkpoint(), options)


def read_model(checkpoint: Checkpoint, path: Path, options: OpenOptions | None = None) -> Model:
    """The model of an open checkpoint, which is closed where there is none.

    Args:
        checkpoint: open.
        path: where it was opened from; what the model is written after has its suffix.
        options: see `open_model`.
    """
    options = OpenOptions() if options is None else options
    try:
        infos = checkpoint.infos
        check_plain(infos, checkpoint.config, checkpoint.where)
        try:
            if options.architecture is not None:
                family = read_family(options.architecture)
            elif options.family is not None:
                family = known_family(options.family)
            else:
                stated = {**checkpoint.config, **options.settings}
                family = recognise(infos, stated, checkpoint.where)
        except CheckpointError:
            check_no_mixture(infos, checkpoint.config, checkpoint.where)
            raise
        if not any(line.mixed for line in family.lines):
            check_no_mixture(infos, checkpoint.config, checkpoint.where)
        binding = bind(family, checkpoint, options.settings)
        return Model(checkpoint, binding, path, options)
    except BaseException:
        checkpoint.close()
        raise


def _check_frequencies(checkpoint: Checkpoint, description: Transformer) -> None:
    """Refuses stored rotary frequencies that differ from the config's: `transformers` reads them.

    Old files hold those before any scaling, in half precision some of them.
    """
    attention = next(iter(description.blocks.values())).attention
    expected = replace(attention, rotary_scaling=None).frequencies()
    for name in checkpoint:
        if not name.endswith("inv_freq") or not attention.rotary:
            continue
        stored = checkpoint[name].double()
        close = stored.shape == expected.shape
        if not close or not torch.allclose(stored, expected, rtol=0.01, atol=1e-6):
            raise CheckpointError(
                f"'{checkpoint.where}': '{name}' expected the rotary frequencies of its config, "
                f"{', '.join(f'{f:.4g}' for f in expected[:3].tolist())} …, found other numbers"
            )


def open_files(path: str | Path | Location) -> Checkpoint:
    """Open a file, folder or repository under the names of hubs."""
    location = Location.of(path)
    checkpoint = Checkpoint.open(location.checkpoint(), where=location.text)
    return as_hub(checkpoint) if ARCHITECTURE in checkpoint.config else checkpoint


def _open_adapted(location: Location, options: OpenOptions) -> Checkpoint:
    """An adapter merged into its base."""
    adapter = Adapter.open(location.checkpoint(), where=location.text)
    with closed_on_error(adapter.close):
        base = adapter.base if options.base is None else Location.of(options.base)
        if base is None:
            raise CheckpointError(
                f"'{location.text}' is an adapter (LoRA), and its base "
                f"{shown(adapter.config.get(BASE_FIELD))} is no model of a hub: give it as --base"
            )
        try:
            if not base.is_adapter:
                return adapted(open_files(base), adapter)
        except DownloadError as error:
            raise DownloadError(f"the base of the adapter '{location.text}': {error}") from error
        raise CheckpointError(
            f"'{location.text}': the base '{base.text}' expected a model, found an adapter too"
        )
