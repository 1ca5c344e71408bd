"""Variants by name: the layers of the authors' code, against layers written out here."""

import pytest
import torch
from torch import nn
from whole_networks import batch_of

from tnfn_command import assert_refused
from transformer_nfn import spaces
from transformer_nfn.models import MLP, StatNN, TransformerNFN
from transformer_nfn.models.predictor import known_variants, model_name
from transformer_nfn.models.statistics import statistics

SPACE = spaces.attention_block(6, 2, 3, 2, 5)
SHAPES = {"W_1": (6, 6), "W_2": (6, 3), "b_1": (6,), "b_2": (3,)}
SIZES = {"embedding": 30, "classifier": 63}


def networks():
    draw = torch.Generator().manual_seed(0)
    shapes = {"W": (4, 6), "b": (6,)}
    embedding, classifier = (
        {k: torch.randn(9, *s, generator=draw, dtype=torch.float64) for k, s in named.items()}
        for named in (shapes, SHAPES)
    )
    blocks = [SPACE.randn(9, dtype=torch.float64) for _ in range(2)]
    return batch_of({"blocks": blocks, "embedding": embedding, "classifier": classifier})


def parts(batch):
    """Blocks, classifier and embedding as vectors, in the order of the code under test."""
    blocks = [block[name].flatten(1) for block in batch.blocks() for name in SPACE.tensors]
    rest = [
        torch.cat([w.flatten(1) for w in batch.part(part).values()], 1)
        for part in ("classifier", "embedding")
    ]
    return torch.cat(blocks, 1), *rest


def test_the_mlp_of_the_authors_reads_all_blocks_by_one_layer():
    batch = networks()
    ours = MLP(SPACE, hidden=7, authors=True, **SIZES).double()
    blocks, classifier, embedding = parts(batch)
    (first,), second, c, e = ours.blocks, ours.neck, ours.classifier, ours.embedding
    layers = nn.Sequential(c[0], nn.ReLU(), c[2], nn.ReLU(), c[4], nn.ReLU())
    read = [second(first(blocks).relu()).relu(), layers(classifier), e(embedding)]
    expected = ours.head(torch.cat(read, 1))[:, 0]
    torch.testing.assert_close(ours.logits(batch), expected, rtol=0, atol=1e-12)
    assert first.in_features == 2 * SPACE.num_weights
    assert sum(p.numel() for p in ours.parameters()) == sum(
        p.numel() for p in MLP(SPACE, hidden=7, **SIZES).parameters()
    )


def test_the_statnn_of_the_authors_reads_the_embedding_linearly():
    batch = networks()
    ours = StatNN(SPACE, embedding=30, classifier=[36, 18, 6, 3], hidden=8, authors=True).double()
    _, _, embedding = parts(batch)
    tensors = [block[name].flatten(1) for block in batch.blocks() for name in SPACE.tensors]
    blocks = torch.cat([statistics(w) for w in tensors], 1)
    classifier = torch.cat([statistics(w.flatten(1)) for w in batch.part("classifier").values()], 1)
    read = [ours.encoder(blocks).relu(), ours.classifier(classifier).relu()]
    expected = ours.head(torch.cat([*read, ours.embedding(embedding)], 1))[:, 0]
    torch.testing.assert_close(ours.logits(batch), expected, rtol=0, atol=1e-12)


def test_the_transformer_nfn_of_the_authors_has_a_relu_more():
    batch = networks()
    torch.manual_seed(0)
    ours, plain = (
        TransformerNFN(SPACE, 2, [3], authors=each, **SIZES).double() for each in (True, False)
    )
    ours.load_state_dict(plain.state_dict())
    _, vector, _ = parts(batch)
    read = plain.classifier(vector)
    lost = (read.relu() - read) @ plain.head.weight[0, 10:20]
    torch.testing.assert_close(
        ours.logits(batch), plain.logits(batch) + lost, rtol=0, atol=1e-12
    )
    assert lost.abs().max() > 1e-3


def test_variants_are_named_with_the_predictors_that_have_them(tmp_path):
    known = known_variants()
    assert {"mlp:authors", "statnn:authors", "transformer_nfn:authors"} <= {*known}
    assert model_name("mlp:authors") == known["mlp:authors"].title != model_name("mlp")
    there = "there are mlp:authors, statnn:authors, transformer_nfn:authors"
    assert_refused(
        f"'xgboost' has no variant 'authors'; {there}",
        "train", "mnist-sample", "--model", "xgboost", "--variant", "authors", "--out", tmp_path,
    )  # fmt: skip
    assert_refused(
        f"'xgboost' has no variant 'authors'; {there}",
        "reproduce", "table1", "mnist-sample", "--models", "mlp,xgboost", "--variant", "authors",
        "--out", tmp_path,
    )  # fmt: skip
    assert_refused(
        "'mlp' has no variant 'publishers'",
        "reproduce", "table1", "mnist-sample", "--variant", "publishers", "--out", tmp_path,
    )  # fmt: skip
    assert_refused(
        "--variant is for table1, table2, table7",
        "reproduce", "table3", "mnist-sample", "--variant", "authors", "--out", tmp_path,
    )  # fmt: skip
    with pytest.raises(KeyError):
        known["transformer_nfn_gated:authors"]
