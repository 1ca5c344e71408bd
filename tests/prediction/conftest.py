from types import SimpleNamespace

import pytest
import torch

from transformer_nfn.zoo import BuildOptions, SizeGroup, Zoo, build_mixed
from transformer_nfn.zoo.training import damage

SIZES = ("w16-h4-d1", "w20-h2-d1", "w16-h4-d2")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """75 runs over three sizes of digits networks; tests must not change it."""
    options = BuildOptions("digits", runs=75, epochs=4, batch=32, samples=128, workers=1)
    groups = [SizeGroup.from_name(name) for name in SIZES]
    return build_mixed(tmp_path_factory.mktemp("kinds") / "m", options, groups)


@pytest.fixture(scope="session")
def broken_mnist(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """All of mnist-sample, shuffled and untrained: at chance, so no test data are needed."""
    out = tmp_path_factory.mktemp("broken") / "mnist"
    at_chance = lambda _, w, __: (torch.full((len(w),), 2.3), torch.full((len(w),), 0.1))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damage, "_load_task", lambda *_: SimpleNamespace(to=lambda _: None))
        patch.setattr(damage, "measure", at_chance)
        options = damage.DamageOptions(kinds="shuffled:1,untrained")
        return damage.damage_zoo("mnist-sample", out, options)
