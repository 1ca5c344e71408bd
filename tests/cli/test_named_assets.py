"""Zoos and predictors by name: packed, found, fetched, checked, and used by every command."""

import importlib.util
import json
import shutil
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner

from transformer_nfn.cli.app import app
from transformer_nfn.io import assets as named_assets
from transformer_nfn.io.assets import AssetError, known_assets
from transformer_nfn.io.location import Location
from transformer_nfn.prediction.data import describe_zoo, load_parts
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.zoo import BuildOptions, Zoo, build
from transformer_nfn.zoo.verify import verify

_spec = importlib.util.spec_from_file_location(
    "pack_assets", Path(__file__).parents[2] / "tools" / "pack_assets.py"
)
pack_assets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pack_assets)

ZOO, PREDICTOR = "digits-sample", "digits-boosting"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A zoo and a run on it."""
    folder = tmp_path_factory.mktemp("source")
    zoo = build(folder / "zoo", BuildOptions("digits", runs=32, epochs=4, samples=200, workers=1))
    parts = load_parts(zoo)
    train_run(describe_zoo(zoo), parts, Experiment("invariant_boosting", [0]), folder / "run")
    return folder


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    """A folder of assets; tests must not change it."""
    assets = tmp_path_factory.mktemp("packed")
    pack_assets.pack_zoo(source / "zoo", ZOO, "Digits.", runs=24, assets=assets)
    pack_assets.pack_predictor(source / "run", PREDICTOR, "Boosting.", assets=assets)
    return assets


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no checkout, no address."""
    monkeypatch.setattr(named_assets, "CHECKOUT", tmp_path / "no checkout")
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(named_assets.URL_VARIABLE, raising=False)
    return tmp_path / "cache" / "assets"


@pytest.fixture
def checkout(packed, cache, tmp_path, monkeypatch):
    """The assets as part of a checkout."""
    copy = Path(shutil.copytree(packed, tmp_path / "checkout"))
    monkeypatch.setattr(named_assets, "CHECKOUT", copy)
    return copy


class _Server(SimpleHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(packed, cache, tmp_path, monkeypatch):
    """The assets behind an address: what it was asked for, and the folder it serves."""
    folder = Path(shutil.copytree(packed, tmp_path / "served"))
    _Server.asked = []
    httpd = HTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(named_assets.URL_VARIABLE, f"http://127.0.0.1:{httpd.server_port}/")
    yield _Server.asked, folder
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def tnfn(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.mark.nightly
def test_a_packed_zoo_is_a_valid_zoo_of_what_was_asked(packed):
    zoo = Zoo.open(packed / ZOO)
    assert len(zoo) == len(set(zoo.table["run"])) == 24
    assert set(zoo.table["percent"]) == {75}
    assert zoo.metadata["dtype"] == "float16"
    verdict = verify(zoo.path, sample=24)
    assert verdict.ok, verdict.problems
    assert verdict.worst == 0, "the recorded accuracy is that of the rounded weights"
    assert not list(packed.glob(".*")), "nothing is left beside"


@pytest.mark.nightly
def test_a_run_is_packed_with_its_best_seed_alone(source, tmp_path):
    zoo = Zoo.open(source / "zoo")
    experiment = Experiment("statnn", [0, 1, 2], Protocol.of("statnn", 2))
    rows = train_run(describe_zoo(zoo), load_parts(zoo), experiment, tmp_path / "run").seeds
    pack_assets.pack_predictor(tmp_path / "run", "best", "One.", best_seed=True, assets=tmp_path)
    best = max(rows, key=lambda row: row["val_tau"])
    record = RunRecord.read(tmp_path / "best")
    assert record.seeds == [best]
    assert record.summary["tau"] == best["tau"]
    assert [p.name for p in (tmp_path / "best").glob("seed-*")] == [f"seed-{best['seed']}"]
    alone = Experiment("statnn", [best["seed"]], Protocol.of("statnn", 2))
    expected = train_run(describe_zoo(zoo), load_parts(zoo), alone, tmp_path / "alone").summary
    assert record.summary["radius"] == pytest.approx(expected["radius"], abs=1e-5)
    assert record.summary["coverage"] == pytest.approx(expected["coverage"], abs=0.05)
    with pytest.raises(AssetError, match="no validation τ"):
        pack_assets.pack_predictor(source / "run", "b", "B.", best_seed=True, assets=tmp_path)


def test_paths_win_over_names(checkout, tmp_path, monkeypatch):
    assert Location.of(ZOO).folder("zoo") == checkout / ZOO
    monkeypatch.chdir(tmp_path)
    (tmp_path / ZOO).mkdir()
    assert Location.of(ZOO).folder("zoo") == Path(ZOO)
    assert Location.of("no/such/folder").folder("zoo") == Path("no/such/folder")


def test_damage_in_a_checkout_is_named(checkout):
    (checkout / PREDICTOR / "run.json").write_text("{}")
    with pytest.raises(AssetError, match=r"digits-boosting/run\.json' is corrupt, expected sha256"):
        Location.of(PREDICTOR).folder("predictor")
    (checkout / PREDICTOR / "run.json").unlink()
    with pytest.raises(AssetError, match=r"digits-boosting/run\.json' is missing"):
        Location.of(PREDICTOR).folder("predictor")


def test_assets_are_fetched_once_and_checked_always(server, cache, packed):
    asked, _ = server
    folder = Location.of(PREDICTOR).folder("predictor")
    assert folder == cache / PREDICTOR
    names = set(known_assets()[PREDICTOR].files)
    assert names == {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    asked.clear()
    Location.of(PREDICTOR).folder("predictor")
    assert asked == ["/index.json"], "the second time it lies in the cache"
    (folder / "training_distance.safetensors").write_bytes(b"torn")
    asked.clear()
    Location.of(PREDICTOR).folder("predictor")
    assert asked == ["/index.json", f"/{PREDICTOR}/training_distance.safetensors"]
    original = packed / PREDICTOR / "training_distance.safetensors"
    assert (folder / "training_distance.safetensors").read_bytes() == original.read_bytes()


def test_what_was_fetched_serves_without_a_network(server, cache, monkeypatch):
    Location.of(PREDICTOR).folder("predictor")
    monkeypatch.setenv(named_assets.URL_VARIABLE, "http://127.0.0.1:9")
    assert Location.of(PREDICTOR).folder("predictor") == cache / PREDICTOR
    monkeypatch.delenv(named_assets.URL_VARIABLE)
    assert Location.of(PREDICTOR).folder("predictor") == cache / PREDICTOR
    with pytest.raises(AssetError, match=rf"'{ZOO}' is not available: .* is not set"):
        Location.of(ZOO).folder("zoo")


def test_a_corrupt_download_is_named_and_not_kept(server, cache):
    _, folder = server
    (folder / ZOO / "index.parquet").write_bytes(b"other")
    with pytest.raises(AssetError, match=rf"/{ZOO}/index\.parquet: corrupt, its sha256 is not"):
        Location.of(ZOO).folder("zoo")
    assert not (cache / ZOO / "index.parquet").exists()
    (folder / ZOO / "index.parquet").unlink()
    with pytest.raises(AssetError, match=rf"/{ZOO}/index\.parquet: could not be fetched"):
        Location.of(ZOO).folder("zoo")


def test_an_index_in_a_checkout_without_the_files_is_enough(server, cache, packed, tmp_path):
    _, folder = server
    named_assets.CHECKOUT.mkdir()
    shutil.copyfile(packed / "index.json", named_assets.CHECKOUT / "index.json")
    (folder / "index.json").unlink()
    assert Location.of(ZOO).folder("zoo") == cache / ZOO


def test_unknown_names_are_answered_with_those_there_are(checkout):
    with pytest.raises(AssetError, match=rf"no zoo of that name; named zoos are {ZOO}$"):
        tnfn("zoo", "info", "mnist-sampel")
    with pytest.raises(AssetError, match=rf"named predictors are {PREDICTOR}$"):
        tnfn("predict", "nfn", f"{ZOO}#0")
    with pytest.raises(AssetError, match=rf"'{ZOO}' is a zoo, expected a predictor"):
        tnfn("evaluate", ZOO)


def test_without_checkout_and_address_the_way_to_names_is_told(cache):
    for words in (["assets"], ["zoo", "info", "mnist-sample"]):
        with pytest.raises(AssetError, match="TRANSFORMER_NFN_ASSETS_URL"):
            tnfn(*words)


@pytest.mark.parametrize("where", ["/etc/passwd", "../x", "a/../../x", ""])
def test_an_index_cannot_lead_out_of_its_folder(checkout, where):
    index = json.loads((checkout / "index.json").read_text())
    index["assets"][ZOO]["files"][where] = {"size": 1, "sha256": "0" * 64}
    (checkout / "index.json").write_text(json.dumps(index))
    with pytest.raises(AssetError, match="leads out of its folder"):
        Location.of(ZOO).folder("zoo")


@pytest.mark.parametrize("text", ["[]", "{", '{"format": 9}', '{"format": 1, "assets": {"a": 3}}'])
def test_a_malformed_index_is_named(checkout, text):
    (checkout / "index.json").write_text(text)
    with pytest.raises(AssetError, match=r"index\.json' (is not (JSON|an object|an index)|has f)"):
        known_assets()


def test_commands_take_names(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tnfn("assets")
    assert ZOO in text
    assert PREDICTOR in text
    found = {row["name"]: row for row in json.loads(tnfn("assets", "--json"))}
    assert (found[ZOO]["kind"], found[PREDICTOR]["kind"]) == ("zoo", "predictor")
    assert found[ZOO]["where"] == "checkout"
    assert json.loads(tnfn("zoo", "info", ZOO, "--json"))["checkpoints"] == 24
    assert "all well" in tnfn("zoo", "verify", ZOO, "--sample", 1)
    tnfn("zoo", "plot", ZOO)
    assert (tmp_path / f"{ZOO}.png").is_file(), "not among the assets"
    (row,) = json.loads(tnfn("predict", PREDICTOR, f"{ZOO}#0", "--json"))
    assert row["name"] == f"{ZOO}#0"
    assert 0 <= row["value"] <= 1
    assert json.loads(tnfn("evaluate", PREDICTOR, ZOO, "--json"))["networks"] == 24
    words = ("--seeds", 1, "--json", "--out")
    trained = json.loads(tnfn("train", ZOO, "--model", "lightgbm", *words, tmp_path / "run"))
    assert trained["zoo"]["name"] == ZOO
    assert len(json.loads(tnfn("reproduce", "table6", ZOO, *words, tmp_path / "results"))) == 3
