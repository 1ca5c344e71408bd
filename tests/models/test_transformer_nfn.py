"""The paper's model: its parameter counts, what it reads, and that it learns."""

from __future__ import annotations

import pytest
import torch
from paper_transcription import PaperModel
from phi_mapping import copy_into_paper

from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.models import Network, TransformerNFN
from transformer_nfn.nn import pooled

SMALL = spaces.attention_block(4, 2, 2, 2, 6)


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def networks(
    space: spaces.WeightSpace, batch: int, blocks: int = 2, **widths: int
) -> Network:
    out: Network = {"blocks": [space.randn(batch) for _ in range(blocks)]}
    for part, width in widths.items():
        out[part] = torch.randn(batch, width)  # type: ignore[literal-required]
    return out


def test_parameter_counts_of_the_papers_table() -> None:
    assert count(TransformerNFN.paper("ag_news")) == 1_804_741
    assert count(TransformerNFN.paper("mnist")) == 1_812_181
    assert count(PaperModel(32, 2, [10], 1188)) == 1_804_741


@pytest.mark.parametrize(
    ("channels", "millions"),
    [
        ([3], "0.491"),
        ([5], "0.840"),
        ([10], "1.793"),
        ([15], "2.857"),
        ([3, 3], "1.901"),
        ([5, 5], "4.757"),
        ([10, 10], "17.457"),
        ([15, 15], "38.101"),
    ],
)
def test_parameter_counts_of_the_ablation(channels: list[int], millions: str) -> None:
    with torch.device("meta"):
        model = TransformerNFN.paper("ag_news", channels, ["encoder"])
    assert f"{count(model) / 1e6:.3f}" == millions


@pytest.mark.parametrize("channels", [[3], [2, 3]])
def test_the_model_is_the_literal_transcription(
    channels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = TransformerNFN(SMALL, 2, channels, classifier=7, pool="sum", init="xavier").double()
    paper = PaperModel(4, 2, channels, 7).double()
    copy_into_paper(model, paper)
    given = networks(SMALL, 5, classifier=7)
    given = {
        "blocks": [{n: x.double() for n, x in w.items()} for w in given["blocks"]],
        "classifier": given["classifier"].double(),  # type: ignore[union-attr]
    }
    expected = paper(given)  # type: ignore[arg-type]
    torch.testing.assert_close(model(given), expected, rtol=1e-10, atol=1e-10)
    # Without gradients, with and without what is written in C.
    for least in (pooled.WORTHWHILE, 0):
        monkeypatch.setattr(pooled, "WORTHWHILE", least)
        with torch.no_grad():
            torch.testing.assert_close(model(given), expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "components",
    [
        ["encoder"],
        ["classifier"],
        ["embedding"],
        ["embedding", "classifier"],
        ["encoder", "classifier"],
        ["encoder", "embedding"],
        ["encoder", "classifier", "embedding"],
    ],
)
def test_any_subset_of_components(components: list[str]) -> None:
    model = TransformerNFN.paper("mnist", [2], components)
    space = model.space
    whole = networks(space, 3, embedding=544, classifier=1386)
    keys = {"encoder": "blocks"}
    part = {keys.get(c, c): whole[keys.get(c, c)] for c in components}  # type: ignore[literal-required]
    out = model(part)
    assert out.shape == (3,)
    assert ((out > 0) & (out < 1)).all()
    torch.testing.assert_close(model(whole), out)


def test_parts_may_be_dicts_of_tensors() -> None:
    model = TransformerNFN(SMALL, 1, [2], classifier=11)
    given = networks(SMALL, 3, 1)
    fc1, fc2 = torch.randn(3, 2, 4), torch.randn(3, 3)
    whole = {**given, "classifier": torch.cat([fc1.flatten(1), fc2], 1)}
    named = {**given, "classifier": {"fc2": fc2, "fc1": fc1}}
    torch.testing.assert_close(model(named), model(whole))


def test_disguised_blocks_get_the_same_number() -> None:
    torch.manual_seed(0)
    for options in ({}, {"pool": "sum", "init": "xavier"}, {"gated": True}, {"rank": 2}):
        model = TransformerNFN(SMALL, 2, [3, 2], **options).double()  # type: ignore[arg-type]
        blocks = [SMALL.randn(4, dtype=torch.float64) for _ in range(2)]
        moved = [SMALL.group.random().act(w) for w in blocks]
        with torch.no_grad():
            torch.testing.assert_close(
                model({"blocks": moved}), model({"blocks": blocks}), rtol=1e-9, atol=1e-9
            )


@pytest.mark.nightly
def test_the_model_can_learn_networks_by_heart() -> None:
    torch.manual_seed(0)
    model = TransformerNFN(SMALL, 2, [6])
    given = networks(SMALL, 32)
    # Random accuracies, as labels no structure could predict.
    target = torch.rand(32)
    least = torch.nn.functional.binary_cross_entropy(target, target).item()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 500)
    losses = []
    for _ in range(500):
        loss = torch.nn.functional.binary_cross_entropy(model(given), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item() - least)
    assert losses[-1] < 1e-3 * losses[0]


def test_an_empty_batch_gives_an_empty_result() -> None:
    for channels in ([3], [3, 3]):
        model = TransformerNFN(SMALL, 2, channels, classifier=7)
        assert model(networks(SMALL, 0, classifier=7)).shape == (0,)


def test_what_the_model_refuses() -> None:
    model = TransformerNFN(SMALL, 2, [2], classifier=7)
    good = networks(SMALL, 3, classifier=7)
    other = spaces.attention_block(4, 2, 2, 2, 7)
    with pytest.raises(SpaceError, match="'W_A' axis 'neuron': expected 6, found 7"):
        model({**good, "blocks": [good["blocks"][0], other.randn(3)]})
    with pytest.raises(SpaceError, match="blocks of a network must have one batch size"):
        model({**good, "blocks": [good["blocks"][0], SMALL.randn(4)]})
    with pytest.raises(SpaceError, match="reads 1 channel, the weights have 2"):
        model({**good, "blocks": [SMALL.randn(3, 2), SMALL.randn(3, 2)]})
    with pytest.raises(SpaceError, match="reads 2 blocks, found 1"):
        model({**good, "blocks": good["blocks"][:1]})
    with pytest.raises(SpaceError, match="'blocks' as a list of weight dicts, found nothing"):
        model({"classifier": good["classifier"]})
    with pytest.raises(SpaceError, match=r"'classifier' must have 7 numbers .* found 8"):
        model({**good, "classifier": torch.randn(3, 8)})
    with pytest.raises(SpaceError, match=r"'classifier' as a tensor .* found nothing"):
        model({"blocks": good["blocks"]})
    with pytest.raises(SpaceError, match="one batch size, found 3, 2"):
        model({**good, "classifier": torch.randn(2, 7)})
    with pytest.raises(SpaceError, match="at least one of"):
        TransformerNFN(SMALL, encoder=False)
    with pytest.raises(SpaceError, match="needs blocks and channels"):
        TransformerNFN(SMALL, channels=[])
    with pytest.raises(SpaceError, match="task must be one of"):
        TransformerNFN.paper("cifar")
    with pytest.raises(SpaceError, match="'ag_news' has encoder, classifier, found 'embedding'"):
        TransformerNFN.paper("ag_news", components=["embedding"])


@pytest.mark.nightly
def test_the_model_compiles() -> None:
    torch.manual_seed(0)
    model = TransformerNFN(SMALL, 2, [3], classifier=7)
    given = networks(SMALL, 4, classifier=7)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(given), model(given))


def test_the_model_runs_for_many_seeds_at_once() -> None:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(TransformerNFN(SMALL, 2, [3], classifier=7))
    given = networks(SMALL, 4, classifier=7)
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]

    def call(p: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(models[0], (p, b), (given,))
        return out

    apart = torch.stack([model(given) for model in models])
    torch.testing.assert_close(torch.func.vmap(call)(parameters, buffers), apart)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(call)(parameters, buffers), apart)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler warns of itself
def test_a_training_step_compiled_to_machine_code_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = TransformerNFN(SMALL, 2, [3], classifier=7)
    given, target = networks(SMALL, 4, classifier=7), torch.rand(4)
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        torch.nn.functional.binary_cross_entropy(run(given), target).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_the_papers_model_is_as_exact_without_gradients() -> None:
    torch.manual_seed(0)
    model = TransformerNFN.paper("ag_news", components=["encoder"])
    given = [{n: 0.2 * x for n, x in model.space.randn(64).items()} for _ in range(2)]
    with torch.no_grad():
        found = model({"blocks": given})
    exact = model.double()({"blocks": [{n: x.double() for n, x in w.items()} for w in given]})
    torch.testing.assert_close(found.double(), exact.detach(), rtol=1e-5, atol=1e-5)


def test_large_batches_are_read_in_portions() -> None:
    torch.manual_seed(0)
    model = TransformerNFN(SMALL, 2, [3])
    given = networks(SMALL, 300)
    whole = model(given)
    with torch.no_grad():
        torch.testing.assert_close(model(given), whole.detach())
