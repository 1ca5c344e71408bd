"""What are the word vectors of a text zoo, and how do they lie in its folder?"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn.zoo.errors import StoreError

VECTORS_FILE = "vectors.safetensors"


@dataclass(frozen=True)
class WordVectors:
    """A vocabulary and a vector for each word, ``[words, width]``, with where they came from."""

    vocabulary: tuple[str, ...]
    vectors: Tensor
    source: str

    def to_bytes(self) -> bytes:
        """As a safetensors file; the vocabulary is UTF-8 JSON in a byte tensor."""
        text = json.dumps([self.source, *self.vocabulary], ensure_ascii=False).encode()
        return safetensors.torch.save(
            {
                "vectors": self.vectors.contiguous(),
                "vocabulary": torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()),
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> WordVectors:
        """Reads what `to_bytes` wrote."""
        try:
            tensors = safetensors.torch.load(data)
            source, *vocabulary = json.loads(tensors["vocabulary"].numpy().tobytes().decode())
            found = WordVectors(tuple(vocabulary), tensors["vectors"], source)
            whole = found.vectors.is_floating_point() and found.vectors.ndim == 2
            if not whole or len(found.vectors) != len(vocabulary):
                raise ValueError(f"{len(vocabulary)} words, vectors {list(found.vectors.shape)}")
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{VECTORS_FILE}: holds no word vectors ({error})") from error
        return found
