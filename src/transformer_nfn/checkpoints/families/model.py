"""Lazy reading of a checkpoint of a known family under canonical names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families.binding import Binding, bind
from transformer_nfn.checkpoints.families.describe import describe
from transformer_nfn.checkpoints.families.family import known_family, read_family
from transformer_nfn.checkpoints.families.recognise import OpenOptions, check_contents, recognise
from transformer_nfn.errors import CheckpointError, MissingTensorError
from transformer_nfn.functional.description import Transformer
from transformer_nfn.io.checkpoint import Checkpoint, OpenFiles, check_no_nan
from transformer_nfn.io.layout import take


class Model(OpenFiles):
    """A checkpoint of a known family: tensors by canonical name, read when asked for.

    Attributes:
        about: the transformer, without its weights.
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
        self.about: Transformer = describe(binding, self.where)
        self.names: Mapping[str, tuple[int, ...]] = self.about.names()

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

    def block(
        self, i: int, stack: str = "", dtype: torch.dtype = torch.float64
    ) -> dict[str, Tensor]:
        """The tensors of one block, by their names without its prefix."""
        prefix = f"{stack}{i}."
        names = [name for name in self.names if name.startswith(prefix)]
        read = self.read(names, dtype)
        return {name.removeprefix(prefix): w for name, w in read.items()}

    def ends(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The tensors of no block."""
        prefixes = tuple(
            f"{stack.prefix}{i}." for stack in self.about.stacks for i in range(len(stack.blocks))
        )
        return self.read([name for name in self.names if not name.startswith(prefixes)], dtype)

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
        if name not in self.binding.holders:
            raise MissingTensorError(f"'{self.where}' holds no tensor '{name}'")
        first, *others = self.binding.holders[name]
        raw = self._finite(first)
        for other in others:
            if not torch.equal(raw, self._finite(other)):
                raise CheckpointError(
                    f"'{self.where}': '{first}' and '{other}' expected the same numbers, both "
                    f"hold '{name}', found different ones"
                )
        entry = self.binding.entries[first]
        found = take(self.binding.sizes, raw.reshape(entry.plain), entry.slots)
        offset = self.binding.family.gain_offset
        if offset:
            found = {n: w.double() + offset if n.endswith(".g") else w for n, w in found.items()}
        return found

    def _finite(self, key: str) -> Tensor:
        found = self.checkpoint[key]
        if found.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(found)):
            raise CheckpointError(
                f"'{self.where}': '{key}' expected numbers, found NaN or infinity"
            )
        return found

    def close(self) -> None:
        """Closes the files; tensors that were read stay."""
        self.checkpoint.close()

    def __repr__(self) -> str:
        return f"Model('{self.where}', {self.about.family}, {len(self.names)} tensors)"


def open_model(path: str | Path, options: OpenOptions | None = None) -> Model:
    """Open a checkpoint of a known family; reads its config and headers, no weights.

    Where nothing states whether the output matrix is the token embedding, both are read.

    Args:
        path: a file or folder, as `Checkpoint.open` takes it.
        options: what its files do not state; without a family in them it is recognised by
            ``config.json``, or by the names of the tensors.
    """
    options = OpenOptions() if options is None else options
    checkpoint = Checkpoint.open(path)
    try:
        infos = {name: checkpoint.info(name) for name in checkpoint}
        check_contents(infos, checkpoint.config, checkpoint.where)
        if options.architecture is not None:
            family = read_family(options.architecture)
        elif options.family is not None:
            family = known_family(options.family)
        else:
            family = recognise(infos, checkpoint.config, checkpoint.where)
        binding = bind(family, checkpoint, options.settings)
        return Model(checkpoint, binding, Path(path), options)
    except BaseException:
        checkpoint.close()
        raise
