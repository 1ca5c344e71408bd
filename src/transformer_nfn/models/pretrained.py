"""How is a model written to a folder and read back? As ``PyTorchModelHubMixin`` does.

A folder holds ``config.json`` (the arguments of the constructor) and ``model.safetensors``. Only
downloading from and uploading to a hub needs ``huggingface_hub``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.files import write_text
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.io.tensor_files import write_tensors
from transformer_nfn.spaces import WeightSpace

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LARGEST_AXIS = 4096
"""A size that is no reason to look twice: such a model fits anywhere."""


class Pretrained(nn.Module):
    """A module that knows its own configuration."""

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A new model from what `config` says."""
        if "space" not in config:
            raise SpaceError("a model's config needs the key 'space'")
        rest = {k: v for k, v in config.items() if k != "space"}
        try:
            return cls(WeightSpace.from_json(config["space"]), **rest)
        except TransformerNFNError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise SpaceError(
                f"a model's config is malformed ({type(error).__name__}: {error})"
            ) from error

    def save_pretrained(self, save_directory: str | Path) -> Path:
        """Writes ``config.json`` and ``model.safetensors`` into a folder, made if need be."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config, indent=2, ensure_ascii=False, sort_keys=True)
        write_text(folder / CONFIG, text + "\n")
        write_tensors(folder / WEIGHTS, self.state_dict(), {"format": "pt"})
        return folder

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        map_location: str = "cpu",
    ) -> Self:
        """Reads a model from a folder, or from a hub by its name (extra ``hub``)."""
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = _download(
                str(pretrained_model_name_or_path), revision, cache_dir, local_files_only
            )
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise TransformerNFNError(f"'{folder}' holds no {name}, so no model can be read")
        config = read_object(folder / CONFIG)
        with Checkpoint.open(folder / WEIGHTS) as stored:
            _check_config(config, stored, folder / CONFIG)
            model = cls.from_config(config)
            _fill(model, stored)
        return model.to(torch.device(map_location)).eval()

    def push_to_hub(self, repo_id: str, *, commit_message: str = "Upload model") -> str:
        """Uploads the model's folder to a hub (extra ``hub``); returns the address."""
        import tempfile

        hub = _hub()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            hub.create_repo(repo_id, exist_ok=True)
            done = hub.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message
            )
        return str(done)


def _check_config(config: Mapping[str, Any], stored: Checkpoint, path: Path) -> None:
    """Refuses sizes that no tensor of the file has, before a model of that size is made."""
    most = max((size for name in stored for size in stored.info(name).shape), default=0)
    most = max(most, len(stored))
    space = config.get("space")
    told = json.loads(space) if isinstance(space, str) and _is_json(space) else None
    for value in _numbers_in([config, told]):
        if isinstance(value, int) and value > max(most, LARGEST_AXIS):
            raise TransformerNFNError(
                f"'{path}' has the size {str(value)[:40]}, but no tensor of {WEIGHTS} is larger "
                f"than {most}"
            )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _numbers_in(data: Any) -> Iterator[int | float]:
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from _numbers_in(item)
    elif isinstance(data, int | float):
        yield data


def _fill(model: nn.Module, stored: Checkpoint) -> None:
    expected = model.state_dict()
    for name in [*expected, *stored]:
        want = list(expected[name].shape) if name in expected else "no such tensor"
        found = list(stored.info(name).shape) if name in stored else "none"
        if want != found:
            raise TransformerNFNError(
                f"'{stored.where}' does not fit its {CONFIG}: '{name}' expected {want}, "
                f"found {found}"
            )
    state = {name: stored[name] for name in expected}
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise TransformerNFNError(
                f"'{stored.where}': '{name}' holds values that are not finite"
            )
    model.load_state_dict(state)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise TransformerNFNError(
            "a model by name comes from a hub: install transformer-nfn[hub], or give a folder"
        ) from error
    return huggingface_hub


def _download(
    name: str, revision: str | None, cache_dir: str | Path | None, local_files_only: bool
) -> Path:
    hub = _hub()
    try:
        return Path(
            hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=[CONFIG, WEIGHTS],
            )
        )
    except (OSError, ValueError) as error:
        raise TransformerNFNError(
            f"'{name}' is neither a folder nor a model that can be downloaded: {error}"
        ) from error
