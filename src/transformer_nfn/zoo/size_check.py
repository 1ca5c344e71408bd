"""Can these be the sizes of a small transformer? Asked of every architecture read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_nfn.io.json_fields import Fields
from transformer_nfn.zoo.errors import ZooError

LARGEST = 1 << 16
"""Of a width; the zoo's networks are small ones."""
DEEPEST = 1000


def check_sizes(data: Mapping[str, Any]) -> None:
    """Refuses sizes that are no whole numbers or that no network here can have.

    Args:
        data: an architecture in JSON; what it lacks is for the caller to say.
    """
    fields = Fields(data, "an architecture in JSON", ZooError)
    for name in ("tokens", "classes", "d_model", "heads", "d_ff"):
        if name in data:
            fields.whole(name, 1, LARGEST)
    if "patch" in data:
        fields.whole("patch", 0, LARGEST)
    if "blocks" in data:
        fields.whole("blocks", 1, DEEPEST)
    width, heads = data.get("d_model", 1), data.get("heads", 1)
    if width % heads:
        raise ZooError(f"an architecture in JSON: {width} numbers do not split into {heads} heads")
