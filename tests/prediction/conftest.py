import pytest

from transformer_nfn.zoo import BuildOptions, MixedZoo, SizeGroup, build_mixed

SIZES = ("w16-h4-d1", "w20-h2-d1", "w16-h4-d2")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> MixedZoo:
    """75 runs over three sizes of digits networks; tests must not change it."""
    options = BuildOptions("digits", runs=75, epochs=4, batch=32, samples=128, workers=1)
    groups = [SizeGroup.from_name(name) for name in SIZES]
    return build_mixed(tmp_path_factory.mktemp("kinds") / "m", options, groups)
