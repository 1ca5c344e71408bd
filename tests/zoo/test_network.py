"""The batched forward of the zoo's network, for every task."""

from __future__ import annotations

import pytest
import torch

from literal_network import literal_logits
from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo import NetworkSizes, SmallTransformer
from transformer_nfn.zoo.module import from_state_dict, load_network, to_state_dict
from transformer_nfn.zoo.training.randomness import dropout_threshold, keys
from transformer_nfn.zoo.training.steps import dropout
from transformer_nfn.zoo.training.tasks import Task


def random_networks(arch: NetworkSizes, n: int) -> torch.Tensor:
    return torch.randn(n, arch.num_weights, generator=torch.Generator().manual_seed(0)) * 0.3


def test_the_paper_counts_these_parameters() -> None:
    mnist, news = NetworkSizes(49, 10, 16), NetworkSizes(512, 4, 0)
    assert (mnist.num_weights, news.num_weights) == (18_506, 17_764)
    for arch, count in ((mnist, 18_506), (news, 17_764)):
        assert sum(p.numel() for p in SmallTransformer(arch).parameters()) == count
        assert arch.space.num_weights == count


def test_forward_equals_the_literal_network(any_task: Task) -> None:
    arch = any_task.arch
    flat = random_networks(arch, 3)
    index = torch.tensor([[0, 5, 9, 3], [1, 2, 3, 4], [7, 7, 8, 0]])
    batch = any_task.batch("train", index)
    positions = arch.positions()
    logits = zoo_logits(
        arch.views(flat), batch.inputs, positions, heads=arch.heads, lengths=batch.lengths
    )
    named = arch.to_named(flat)
    for m in range(3):
        one = {k: w[m] for k, w in named.items()}
        inputs = any_task.module_inputs(batch.inputs[m])
        if batch.lengths is not None:
            inputs = inputs[:, : int(batch.lengths[m])]
        expected = literal_logits(to_state_dict(arch, one), inputs, positions, arch.heads)
        with torch.no_grad():
            module = load_network(arch, one)(inputs)
        for found in (logits[m], module):
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


def test_named_tensors_round_trip_bit_for_bit(any_task: Task) -> None:
    arch = any_task.arch
    flat = random_networks(arch, 2)
    named = arch.to_named(flat)
    arch.space.check(named, lead=1)
    assert torch.equal(arch.from_named(named), flat)
    one = {k: w[1] for k, w in named.items()}
    back = from_state_dict(arch, to_state_dict(arch, one))
    assert all(torch.equal(back[k], one[k]) for k in one)


def test_block_weights_are_the_papers_convention() -> None:
    """X W_Q with heads as the module splits them, so that block spaces mean what they say."""
    arch = NetworkSizes(49, 10, 16)
    module = SmallTransformer(arch)
    named = from_state_dict(arch, module.state_dict())
    x = torch.randn(5, 32)
    queries = module.encoder[0].attention.queries(x).view(5, 2, 16)
    ours = torch.einsum("td,hdk->thk", x, named["blocks.0.W_Q"])
    torch.testing.assert_close(ours, queries)


def test_positions_are_the_sinusoids_of_vaswani() -> None:
    p = NetworkSizes(49, 10, 16).positions()
    assert p[0].tolist() == [0.0, 1.0] * 16
    assert p[7, 4].item() == pytest.approx(torch.sin(torch.tensor(7 / 10000 ** (4 / 32))).item())
    assert p[7, 5].item() == pytest.approx(torch.cos(torch.tensor(7 / 10000 ** (4 / 32))).item())


def test_dropout_drops_as_often_as_each_network_asks() -> None:
    p = torch.tensor([0.0, 0.05, 0.2])
    threshold = dropout_threshold(p)
    key = keys(torch.tensor([[1], [2], [3]]), 4, torch.arange(5))
    scale = 65536 / (65536 - threshold.float())
    out = dropout(key, threshold, scale, 49)(torch.ones(3, 64, 49, 32), 0)
    dropped = (out == 0).float().mean((1, 2, 3))
    assert dropped[0] == 0
    assert torch.allclose(dropped, p, atol=0.005)
    assert torch.allclose(out.mean((1, 2, 3)), torch.ones(3), atol=0.01)


def test_dropout_sites_and_halves_are_independent() -> None:
    key = keys(torch.tensor([[9]]), 4, torch.arange(5))
    threshold = torch.tensor([32768], dtype=torch.int32)
    drop = dropout(key, threshold, torch.tensor([2.0]), 49)
    masks = [(drop(torch.ones(1, 64, 49, 32), site) > 0).float().flatten() for site in (0, 1)]
    halves = masks[0].view(-1, 2, 16)
    for a, b in ((masks[0], masks[1]), (halves[:, 0].flatten(), halves[:, 1].flatten())):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02
