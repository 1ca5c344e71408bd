"""Layout of a tied model in a file once its output matrix is its own: one or two keys more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from transformer_nfn.checkpoints.families.binding import Binding, Entry
from transformer_nfn.checkpoints.families.keys import find_prefix, find_wrapper, standard_names
from transformer_nfn.checkpoints.families.model import Model
from transformer_nfn.checkpoints.families.sizes import Sizes
from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.layout import file_shape
from transformer_nfn.io.rewrite import Additions
from transformer_nfn.io.tensor_files import TensorInfo

# What configs say of a tie: whether there is one, and T5's scale that goes with it.
TIE, TIED_SCALE = "tie_word_embeddings", "scale_decoder_outputs"


@dataclass(frozen=True)
class Target:
    """What a model is written as.

    Attributes:
        binding: which tensor of the file holds what.
        names: shape of each tensor by canonical name.
        additions: what the source does not have.
    """

    binding: Binding
    names: Mapping[str, tuple[int, ...]]
    additions: Additions = field(default_factory=Additions)


def target_of(model: Model, *, untied: bool) -> Target:
    """As the source lies, or with an output matrix of its own where it is tied.

    The bias of the output matrix stands twice in some files, and the library reads the second
    one where nothing is tied; it is added as well.
    """
    if not (untied and model.about.tied):
        return Target(model.binding, model.names)
    if not model.checkpoint.config:
        raise CheckpointError(
            f"'{model.where}' has no config.json that could say that its output matrix is no "
            "longer the token embedding: keep the tie"
        )
    binding = model.binding
    entries, holders = dict(binding.entries), dict(binding.holders)
    infos = {key: model.checkpoint.info(key) for key in model.checkpoint}
    sizes = Sizes({**binding.sizes.axes, "class": binding.sizes.axes["vocab"]})
    prefix = find_prefix(binding.family, standard_names(binding.family, infos), model.where)
    wrapper = find_wrapper(binding.family, infos)
    token, added = holders["token"], {}
    for line in binding.family.lines:
        holds = [slot.tensor for slot in line.slots]
        if not line.tied and (holds != ["head_bias"] or "head_bias" not in holders):
            continue
        key = wrapper + (line.key if line.outside else f"{prefix}{line.key}")
        shape = file_shape(sizes, line.slots)
        entries[key] = Entry(key, line.slots, shape, shape)
        if key not in infos:
            added[key] = TensorInfo(shape, infos[token[0]].dtype)
        if line.tied:
            holders["head"] = (*holders.get("head", ()), key)
        elif key not in holders["head_bias"]:
            holders["head_bias"] = (*holders["head_bias"], key)
    holders["token"] = tuple(key for key in token if key not in holders["head"])
    changes = {TIE: False} | ({TIED_SCALE: False} if TIED_SCALE in model.config else {})
    return Target(
        replace(binding, tied=False, entries=entries, holders=holders, sizes=sizes),
        {**model.names, "head": (model.about.width, model.names["token"][0])},
        Additions(added, holders["token"][0], changes),
    )
