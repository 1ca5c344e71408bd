"""Base class of the models: predicts accuracies, and is saved to and loaded from a folder.

A folder holds ``config.json`` (the arguments of the constructor) and ``model.safetensors``, as with
``PyTorchModelHubMixin``. Only a hub needs ``huggingface_hub``.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parameter import is_lazy

from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.io.files import write_text
from transformer_nfn.io.hub import client
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.io.location import HUB, Location
from transformer_nfn.io.tensor_files import TensorInfo, read_tensors, write_tensors
from transformer_nfn.models.batch import Batch
from transformer_nfn.models.predictor import LearningSet, Predictor
from transformer_nfn.models.stored_state import check_state
from transformer_nfn.spaces import WeightSpace

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Inputs = tuple[Sequence[Batch], Sequence[Batch]]
"""Training and validation networks of each size, as a module reads them in every step."""
LARGEST_AXIS = 4096
"""Sizes up to this need no check: such a model fits anywhere."""


class Pretrained(nn.Module, Predictor):
    """A model with a configuration; subclasses set `space` and `_config` and define `logits`.

    Its training is the paper's: Adam, binary cross-entropy, every network once per epoch. A
    subclass may have another loss and optimiser, and work to do before and after.

    Attributes:
        stacked: whether seeds can share each step, as one pass over stacked parameters.
        captured: whether steps on a GPU may be captured as CUDA graphs.
        start_note: progress note for `start`, if it takes long.
    """

    space: WeightSpace
    stacked = True
    captured = True
    start_note = ""
    _config: dict[str, Any]

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these."""
        layout = data.network.layout
        sizes = {part: layout.part(part) for part in ("embedding", "classifier")}
        return cls(data.block_space, layout.depth, **(sizes | options))

    def networks_per_epoch(self, networks: Sequence[int], runs: Sequence[int]) -> list[int]:
        """Number of networks of each size in an epoch, given those there are, and their runs."""
        return list(networks)

    def start(
        self, train: Sequence[LearningSet], val: Sequence[LearningSet], seed: int, epochs: int, *,
        fresh: bool,
    ) -> Inputs:  # fmt: skip
        """Set up before training, networks of each size; ``fresh`` unless a killed one resumes."""
        return [data.network for data in train], [data.network for data in val]

    def own_optimiser(self, rate: float) -> torch.optim.Optimizer | None:
        """Optimiser of this module alone; None for one of all seeds."""
        return None

    def kept_state(self) -> dict[str, Tensor]:
        """What a training resumes with besides its parameters."""
        return {}

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Set what `kept_state` gave."""

    def stepping(self, *seed: int) -> contextlib.AbstractContextManager[None]:
        """Context of a training step, by seed and number of the step."""
        return contextlib.nullcontext()

    def finish(self, val: Sequence[LearningSet], inputs: Sequence[Batch]) -> None:
        """Finish at the best epoch, by the validation networks of each size."""

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """Loss on one batch."""
        return binary_cross_entropy_with_logits(logits, accuracy)

    def optimiser(self, state: Mapping[str, Tensor], **options: Any) -> torch.optim.Optimizer:
        """Optimiser of the parameters of a seed, named ``SEED.PARAMETER``, by Adam's options.

        Of stacked seeds there is one for all, and names are those of the parameters.
        """
        return torch.optim.Adam(list(state.values()), **options)

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Predicted accuracy of each network, ``[n]`` in float32; NaN where numbers overflow."""
        self.eval()
        device = next(self.parameters()).device

        found = batch.in_chunks(lambda part: self.logits(part.to(device))).cpu()
        return self.to_accuracy(torch.where(found.isinf(), torch.nan, found)).clamp(0, 1)

    @property
    def num_parameters(self) -> int | None:
        """Number of trainable parameters."""
        return sum(int(p.numel()) for p in self.parameters())

    def logits(self, batch: Batch) -> Tensor:
        """The number that training compares with the accuracy, ``[batch]``."""
        raise NotImplementedError

    def to_accuracy(self, logits: Tensor) -> Tensor:
        """Accuracies that logits stand for: their Sigmoid, unless a model's loss differs."""
        return torch.sigmoid(logits)

    def forward(self, batch: Batch) -> Tensor:
        """The predicted accuracy of each network, ``[batch]``."""
        return self.to_accuracy(self.logits(batch))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        return {"space": self.space.to_json(), **self._config}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build a new model from a `config`."""
        if "space" not in config:
            raise SpaceError("a model's config needs the key 'space'")
        rest = {k: v for k, v in config.items() if k != "space"}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Initializing zero-element tensors")
                return cls(WeightSpace.from_json(config["space"]), **rest)
        except TransformerNFNError:
            raise
        except (
            TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError, UserWarning
        ) as error:  # fmt: skip
            raise SpaceError(
                f"a model's config is malformed ({type(error).__name__}: {error})"
            ) from error

    def save(self, folder: str | Path) -> Path:
        """Write into a folder, as every predictor is."""
        return self.save_pretrained(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote."""
        return cls.from_pretrained(folder)

    def save_pretrained(self, save_directory: str | Path) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into a folder, made if need be."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config, indent=2, ensure_ascii=False, sort_keys=True)
        write_text(folder / CONFIG, text + "\n")
        write_tensors(folder / WEIGHTS, self.state_dict(), {"format": "pt"})
        return folder

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, revision: str | None = None
    ) -> Self:
        """Load a model from a folder, or from a hub by its name (extra ``hub``)."""
        location = Location.of(pretrained_model_name_or_path)
        if revision is not None and location.repository is not None:
            location = Location.hub(f"{HUB}{location.repository}@{revision}")
        folder = location.fetch(name for name in (CONFIG, WEIGHTS) if name in location.files())
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise TransformerNFNError(
                    f"'{location.text}' holds no {name}, so no model can be read"
                )
        config = read_object(folder / CONFIG)
        stored, _ = read_tensors(folder / WEIGHTS)
        _check_config(config, stored, folder / CONFIG)
        model = cls.from_config(config)
        # Lazy layers have no shapes before they are filled.
        expected = {
            name: TensorInfo.of(stored.get(name, w) if is_lazy(w) else w)
            for name, w in model.state_dict().items()
            if name in stored or not is_lazy(w)
        }
        check_state(stored, expected, str(folder / WEIGHTS), TransformerNFNError)
        model.load_state_dict(stored)
        return model.eval()

    def push_to_hub(self, repo_id: str, *, commit_message: str = "Upload model") -> str:
        """Upload the model's folder to a hub (extra ``hub``); returns the address."""
        hub = client()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            hub.create_repo(repo_id, exist_ok=True)
            address = hub.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message
            )
        return str(address)


@contextlib.contextmanager
def seeded(*seed: int) -> Iterator[int]:
    """Context in which PyTorch draws from a seed alone; the global generators stay as they are.

    >>> with seeded(1, 2):
    ...     first = torch.rand(())
    >>> with seeded(1, 2):
    ...     bool(torch.rand(()) == first)
    True
    """
    number = int(np.random.SeedSequence(seed).generate_state(1)[0])
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(number)
        yield number


def _check_config(config: Mapping[str, Any], stored: Mapping[str, Tensor], path: Path) -> None:
    """Reject sizes that no tensor of the file has, before a model of that size is allocated."""
    largest = max((size for w in stored.values() for size in w.shape), default=0)
    largest = max(largest, len(stored))
    try:
        space = json.loads(config["space"])
    except (KeyError, TypeError, ValueError, RecursionError):
        space = None  # `from_config` reports it
    for value in _numbers_in([config, space]):
        if isinstance(value, int) and value > max(largest, LARGEST_AXIS):
            raise TransformerNFNError(
                f"'{path}' has the size {str(value)[:40]}, but no tensor of {WEIGHTS} is larger "
                f"than {largest}"
            )


def _numbers_in(data: Any) -> Iterator[int | float]:
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from _numbers_in(item)
    elif isinstance(data, int | float):
        yield data
