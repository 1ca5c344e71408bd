"""Transformer-NFN and the neural baselines: the paper's numbers, exactness, files and errors."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from paper_transcription import PaperModel
from phi_mapping import copy_into_paper
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from whole_networks import Net, batch_of

from hub_server import Hub
from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.models import MLP, Batch, StatNN, TransformerNFN
from transformer_nfn.models.statistics import statistics
from transformer_nfn.nn import pooled

SPACE = spaces.attention_block(6, 2, 3, 2, 5)
CLASSIFIER = {"W_1": (6, 6), "W_2": (6, 3), "b_1": (6,), "b_2": (3,)}
SIZES = {"embedding": 30, "classifier": 63}
MODELS: dict[str, Callable[[], Any]] = {
    "nfn": lambda: TransformerNFN(SPACE, 2, [3], **SIZES),
    "gated": lambda: TransformerNFN(SPACE, 2, [2, 3], gated=True, **SIZES),
    "mlp": lambda: MLP(SPACE, hidden=7, **SIZES),
    "statnn": lambda: StatNN(SPACE, embedding=30, classifier=[36, 18, 6, 3], hidden=8),
}
every = pytest.mark.parametrize("name", MODELS)


def parts(batch: int) -> Net:
    return {
        "embedding": {"W": torch.randn(batch, 4, 6), "b": torch.randn(batch, 6)},
        "blocks": [SPACE.randn(batch) for _ in range(2)],
        "classifier": {k: torch.randn(batch, *s) for k, s in CLASSIFIER.items()},
    }


def networks(batch: int) -> Batch:
    return batch_of(parts(batch))


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]()


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts_of_the_paper() -> None:
    tables: dict[Any, tuple[int, int]] = {
        TransformerNFN: (1_804_741, 1_812_181),
        MLP: (896_051, 933_251),
        StatNN: (168_449, 203_393),
    }
    for kind, counts in tables.items():
        assert tuple(count(kind.paper(task)) for task in ("ag_news", "mnist")) == counts
        with pytest.raises(SpaceError, match="task must be one of mnist, ag_news, found 'cifar'"):
            kind.paper("cifar")
    assert count(PaperModel(32, 2, [10], 1188)) == 1_804_741
    ablation = {"[3]": "0.491", "[5]": "0.840", "[10]": "1.793", "[15]": "2.857", "[3,3]": "1.901",
                "[5,5]": "4.757", "[10,10]": "17.457", "[15,15]": "38.101"}  # fmt: skip
    for channels, millions in ablation.items():
        with torch.device("meta"):
            model = TransformerNFN.paper("ag_news", json.loads(channels), ["encoder"])
        assert f"{count(model) / 1e6:.3f}" == millions


@pytest.mark.parametrize("channels", [[3], [2, 3]])
def test_the_model_is_the_literal_transcription(
    channels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    space = spaces.attention_block(4, 2, 2, 2, 6)
    model = TransformerNFN(space, 2, channels, classifier=7, pool="sum", init="xavier").double()
    paper = PaperModel(4, 2, channels, 7).double()
    copy_into_paper(model, paper)
    network: Any = {
        "blocks": [space.randn(5, dtype=torch.float64) for _ in range(2)],
        "classifier": torch.randn(5, 7, dtype=torch.float64),
    }
    expected, batch = paper(network), batch_of(network)
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)
    # Without gradients, with and without the C code.
    for least in (pooled.WORTHWHILE, 0):
        monkeypatch.setattr(pooled, "WORTHWHILE", least)
        with torch.no_grad():
            torch.testing.assert_close(model(batch), expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "components",
    [["encoder"], ["embedding"], ["encoder", "classifier"], ["encoder", "classifier", "embedding"]],
)
def test_only_the_chosen_components_are_read(components: list[str]) -> None:
    model = TransformerNFN.paper("mnist", [2], components)
    full: Any = {
        "blocks": [model.space.randn(3) for _ in range(2)],
        "embedding": torch.randn(3, 544),
        "classifier": torch.randn(3, 1386),
    }
    keys = [{"encoder": "blocks"}.get(c, c) for c in components]
    out = model(batch_of({key: full[key] for key in keys}))
    assert out.shape == (3,)
    assert bool(((out > 0) & (out < 1)).all())
    torch.testing.assert_close(model(batch_of(full)), out)


def test_the_group_does_not_change_predictions() -> None:
    torch.manual_seed(0)
    options: list[dict[str, Any]] = [{}, {"pool": "sum", "init": "xavier"}, {"gated": True},
                                     {"rank": 2}]  # fmt: skip
    for option in options:
        model = TransformerNFN(SPACE, 2, [3, 2], **option).double()
        blocks = [SPACE.randn(4, dtype=torch.float64) for _ in range(2)]
        moved = [SPACE.group.random().act(w) for w in blocks]
        with torch.no_grad():
            before, after = (model(batch_of({"blocks": each})) for each in (blocks, moved))
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def test_batches_of_any_size_are_read() -> None:
    for name in ("nfn", "gated"):
        model = made(name)
        assert model(networks(0)).shape == (0,)
        large = networks(300)
        with torch.no_grad():
            torch.testing.assert_close(model(large), model(large).detach())


@every
def test_a_model_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    model, network = made(name), networks(3)
    folder = model.save_pretrained(tmp_path / "new" / "model")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    back = type(model).from_pretrained(folder)
    assert back.config == model.config == json.loads((folder / "config.json").read_text())
    assert torch.equal(back(network), model(network))
    with pytest.raises(SpaceError, match="config is malformed"):
        type(model).from_config(model.config | {"colour": "red"})
    with pytest.raises(SpaceError, match="needs the key 'space'"):
        type(model).from_config({})


def test_a_folder_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    made("nfn").save_pretrained(tmp_path)
    TransformerNFN.from_pretrained(tmp_path)
    with pytest.raises(TransformerNFNError, match=r"install .transformer-nfn\[hub\]"):
        TransformerNFN.from_pretrained("somebody/some-model")


def test_a_model_goes_to_a_hub_and_comes_back(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are doubles, which take the arguments of those they stand for."""
    import huggingface_hub

    uploads = []

    def create_repo(repo_id: str, **options: Any) -> None:
        assert options["exist_ok"] or repo_id not in hub.commits

    def upload_folder(repo_id: str, folder_path: str, commit_message: str) -> str:
        uploads.append((commit_message, sorted(p.name for p in Path(folder_path).iterdir())))
        hub.put(repo_id, Path(folder_path))
        return f"https://hub/{repo_id}"

    for double in (create_repo, upload_folder):
        name = double.__name__
        stands = create_autospec(getattr(huggingface_hub, name), side_effect=double)
        monkeypatch.setattr(huggingface_hub, name, stands)
    model, network = made("nfn"), networks(3)
    for _ in range(2):  # the second time the repository is there
        address = model.push_to_hub("somebody/some-model", commit_message="First")
    assert address == "https://hub/somebody/some-model"
    assert uploads == [("First", ["config.json", "model.safetensors"])] * 2
    back = TransformerNFN.from_pretrained("somebody/some-model", revision="main")
    assert torch.equal(back(network), model(network))
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors"]
    with pytest.raises(TransformerNFNError, match="no model on the hub"):
        TransformerNFN.from_pretrained("somebody/another")


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(TransformerNFNError, match=r"holds no config\.json"):
        TransformerNFN.from_pretrained(tmp_path)
    made("nfn").save_pretrained(tmp_path)
    config = json.loads(path.read_text(encoding="utf-8"))
    texts = {
        json.dumps(config | {"channels": [4]}): " expected ",
        json.dumps(config | {"classifier": 10**9}): "but no tensor of model.safetensors is larger",
        "{": "is not JSON",
    }
    for text, words in texts.items():
        path.write_text(text)
        with pytest.raises(TransformerNFNError, match=words):
            TransformerNFN.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["nfn", "mlp", "statnn"])
def test_several_seeds_run_together(name: str) -> None:
    models, network = [made(name, seed) for seed in range(3)], networks(4)
    state, buffers = stack_module_state(models)

    def call(state: Any, buffers: Any) -> Tensor:
        out: Tensor = functional_call(models[0], (state, buffers), (network,))
        return out

    apart = torch.stack([model(network) for model in models])
    torch.testing.assert_close(vmap(call)(state, buffers), apart)
    with torch.no_grad():
        torch.testing.assert_close(vmap(call)(state, buffers), apart)


@every
def test_other_networks_are_rejected(name: str) -> None:
    model, network = made(name), parts(3)
    wrong: dict[str, tuple[str, Any]] = {
        "'W_Q' axis 'input': expected 6, found 8": (
            "blocks", [spaces.attention_block(8, 2, 3, 2, 5).randn(3)] * 2),
        "reads 2 blocks, found 1": ("blocks", [SPACE.randn(3)]),
        "reads 2 blocks, found 0": ("blocks", []),
        "'classifier' must have 63 numbers .* found 64": ("classifier", torch.randn(3, 64)),
        r"reads tensors named 'embedding\.…', found none": ("embedding", {}),
    }  # fmt: skip
    for words, (part, value) in wrong.items():
        with pytest.raises(SpaceError, match=words):
            model(batch_of({**network, part: value}))


def test_models_that_cannot_be_built() -> None:
    with pytest.raises(SpaceError, match="at least one of"):
        TransformerNFN(SPACE, encoder=False)
    with pytest.raises(SpaceError, match="needs blocks and channels"):
        TransformerNFN(SPACE, channels=[])
    with pytest.raises(SpaceError, match="'ag_news' has encoder, classifier, found 'embedding'"):
        TransformerNFN.paper("ag_news", components=["embedding"])
    with pytest.raises(SpaceError, match="needs blocks and neurons"):
        MLP(SPACE, hidden=0)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_statistics_are_those_of_torch(size: int) -> None:
    x = torch.randn(4, size, dtype=torch.float64, requires_grad=True)
    found = statistics(x)
    q = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    assert torch.allclose(found[:, 0], x.mean(-1))
    assert torch.allclose(found[:, 1], x.var(-1, correction=0))
    assert torch.allclose(found[:, 2:], x.quantile(q, -1).mT)
    torch.autograd.gradcheck(statistics, (x,))


@pytest.mark.nightly
def test_the_model_can_learn_networks_by_heart() -> None:
    model, network = made("nfn"), networks(32)
    target = torch.rand(32)  # labels no structure could predict
    least = nn.functional.binary_cross_entropy(target, target).item()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 500)
    losses = []
    for _ in range(500):
        loss = nn.functional.binary_cross_entropy(model(network), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item() - least)
    assert losses[-1] < 1e-3 * losses[0]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler warns of itself
def test_compiled_models_give_the_same_numbers_and_gradients() -> None:
    model, network, target = made("nfn"), networks(4), torch.rand(4)
    eager = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(eager(network), model(network))
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        nn.functional.binary_cross_entropy(run(network), target).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
