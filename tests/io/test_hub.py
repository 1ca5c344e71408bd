"""Checkpoints of a hub: what is fetched, checked and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hub_server import Hub, into_shards, read_folder
from lora_folders import merge, write_adapter
from tnfn_command import as_json, tnfn
from transformer_nfn.checkpoints import OpenOptions, open_model
from transformer_nfn.errors import CheckpointError, TransformerNFNError
from transformer_nfn.io import location
from transformer_nfn.io.hub import commit_of
from transformer_nfn.testing import write_example_checkpoint

REPOSITORY = "org/model-1.5B"


def refused(text: str, options: OpenOptions | None = None) -> str:
    with pytest.raises(TransformerNFNError) as error:
        open_model(text, options).close()
    return str(error.value)


@pytest.mark.parametrize("text", [REPOSITORY, f"hf:{REPOSITORY}@main", f"hf:{REPOSITORY}:deep/er"])
def test_only_the_needed_files_are_fetched_and_only_once(
    hub: Hub, tmp_path: Path, text: str
) -> None:
    folder = into_shards(write_example_checkpoint(tmp_path / "local"))
    within = "deep/er/" if text.endswith("er") else ""
    beside = ("pytorch_model.bin", "tf_model.h5", "other.safetensors", "README.md", "q4.gguf")
    files = {f"{within}{name}": data for name, data in read_folder(folder).items()}
    hub.put(REPOSITORY, {**files, **{f"{within}{name}": b"not read" for name in beside}})
    with open_model(text) as model, open_model(folder) as local:
        assert model.where == text
        assert all(torch.equal(model[name], local[name]) for name in local.names)
    assert sorted(hub.fetched()) == sorted(files)
    open_model(text).close()
    assert len(hub.fetched()) == len(files)


def test_headers_of_a_large_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "LARGE", 5000)
    folder = into_shards(write_example_checkpoint(tmp_path / "local"))
    hub.put(REPOSITORY, folder)
    here, there = as_json("inspect", folder), as_json("inspect", REPOSITORY)
    weights = [name for name in read_folder(folder) if name.endswith(".safetensors")]
    assert hub.fetched("PART") == weights
    assert not set(weights) & set(hub.fetched())
    for key in ("family", "sizes", "tensors", "group", "ties"):
        assert there[key] == here[key]
    assert (len(here["blocks"]), there["blocks"]) == (2, [])
    done = tnfn("inspect", REPOSITORY, "--figure", tmp_path / "x.svg")
    assert (done.returncode, "fetch them first by `hf download`" in done.stderr) == (2, True)
    open_model(REPOSITORY).close()
    assert as_json("inspect", REPOSITORY)["blocks"] == here["blocks"]


def test_a_named_file_is_read_alone(hub: Hub, tmp_path: Path) -> None:
    folder = write_example_checkpoint(tmp_path / "local")
    files = read_folder(folder)
    hub.put(REPOSITORY, {"config.json": files["config.json"], "a.gguf": b"x", "b.gguf": b"y"})
    message = refused(REPOSITORY)
    assert f"name one of them, such as 'hf:{REPOSITORY}:a.gguf'" in message
    assert "GGUF" in refused(f"hf:{REPOSITORY}:a.gguf")
    assert hub.fetched() == ["a.gguf"]
    assert "holds no file or folder 'c.gguf'" in refused(f"hf:{REPOSITORY}:c.gguf")


def test_modules_of_a_sentence_transformer(hub: Hub, tmp_path: Path) -> None:
    folder = write_example_checkpoint(tmp_path / "local")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "../other": "Dense"}
    modules = [{"path": path, "type": f"models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense", "3_Other"):
        (folder / name).mkdir()
        config = {"pooling_mode_mean_tokens": True, "in": name}
        (folder / name / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / "2_Dense" / name).write_bytes(name.encode())
    hub.put(REPOSITORY, folder)
    with open_model(REPOSITORY) as there, open_model(folder) as here:
        assert there.config == here.config
        assert "Dense" in there.config["sentence_pooling"]
    assert sorted(hub.fetched()) == [
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json",
        "model.safetensors", "modules.json",
    ]  # fmt: skip


def test_a_process_reads_one_commit(hub: Hub, tmp_path: Path) -> None:
    first = hub.put(REPOSITORY, write_example_checkpoint(tmp_path / "0", 0))
    with open_model(REPOSITORY) as model:
        before = model["token"]
    hub.put(REPOSITORY, write_example_checkpoint(tmp_path / "1", 1))
    with open_model(REPOSITORY) as again:
        assert torch.equal(before, again["token"])
    commit_of.cache_clear()
    with open_model(REPOSITORY) as moved, open_model(f"hf:{REPOSITORY}@{first}") as pinned:
        assert not torch.equal(moved["token"], before)
        assert torch.equal(pinned["token"], before)


def test_the_cache_is_read_without_the_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(REPOSITORY, write_example_checkpoint(tmp_path / "local"))
    open_model(REPOSITORY).close()
    commit_of.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    open_model(REPOSITORY).close()
    assert "is not in" in refused("org/other")
    assert "network is forbidden" in refused(f"hf:{REPOSITORY}@v2")
    assert len(hub.requests) == asked


def test_an_adapter_brings_its_base(hub: Hub, tmp_path: Path) -> None:
    base = write_example_checkpoint(tmp_path / "base")
    fields = {"base_model_name_or_path": "org/base", "revision": hub.put("org/base", base)}
    hub.put("org/base", write_example_checkpoint(tmp_path / "moved", 1))
    adapter = write_adapter(base, tmp_path / "adapter", **fields)
    merged = merge(base, adapter, tmp_path / "merged", {"_proj": 1.5})
    hub.put("org/adapter", adapter)
    for text in ("org/adapter", str(adapter)):
        with open_model(text) as model, open_model(merged) as expected:
            for name in expected.names:
                torch.testing.assert_close(model[name], expected[name], rtol=1e-5, atol=1e-6)
    assert sorted(hub.fetched()) == [
        "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["../base", "/etc", "base", ".", "C:/base", "https://x/y", 3, None]
)
def test_a_base_that_an_adapter_names_is_no_path(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    base = write_example_checkpoint(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", base_model_name_or_path=name)
    monkeypatch.chdir(tmp_path)
    message = refused(str(adapter))
    assert "--base" in message or "no model on the hub" in message
    with open_model(adapter, OpenOptions(base=base)) as model:
        assert model.names


def test_errors_name_the_remedy(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put(REPOSITORY, write_example_checkpoint(tmp_path / "local"))
    hub.gated.add(REPOSITORY)
    assert "accept its licence on its page of the hub and log in" in refused(REPOSITORY)
    assert "check the name, or log in by `hf auth login`" in refused("org/nowhere")
    assert "has no revision 'v9'" in refused(f"hf:{REPOSITORY}@v9")
    hub.renamed["org/old"] = REPOSITORY
    assert f"was renamed on the hub: name it '{REPOSITORY}'" in refused("org/old")
    hub.spoil = lambda method, path: "401"
    assert "log in again by `hf auth login`" in refused("org/new")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    hub.spoil, hub.gated = (lambda method, path: None), set()
    assert "make room, or name another folder by HF_HOME" in refused(REPOSITORY)


def test_an_index_cannot_name_what_is_outside(hub: Hub, tmp_path: Path) -> None:
    files = read_folder(into_shards(write_example_checkpoint(tmp_path / "local")))
    outside = tmp_path / "outside.safetensors"
    save_file({"x": torch.zeros(2)}, outside)
    for name in ("../../outside.safetensors", str(outside), "..\\x", "missing.safetensors"):
        index = json.dumps({"weight_map": {"x": name}}).encode()
        hub.put(REPOSITORY, {**files, "model.safetensors.index.json": index})
        commit_of.cache_clear()
        assert "which is not in the repository" in refused(REPOSITORY)
    hub.put(REPOSITORY, {**files, "../../../x": b"x"})
    commit_of.cache_clear()
    assert "leads out of the repository" in refused(REPOSITORY)


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:a b/c", "hf:../x", "hf:a/../b", "hf:a/b/c", "hf:--x/y", "hf:a/b@", "hf:a/b@../x",
     "hf:a/b@x y", "hf:a/b:", "hf:a/b:../../etc/passwd", "hf:a/b:/etc/passwd", "hf://a/b",
     "hf:a/b?x=1", "hf:a/b#1", "https://huggingface.co/a/b", "http://127.0.0.1/a/b",
     f"hf:{'a' * 60}/{'b' * 60}", "hf:a/b:x\\y", "hf:a/b\n", "hf:a/b:x\0y"],
)  # fmt: skip
def test_what_is_no_model_of_a_hub(hub: Hub, text: str) -> None:
    assert "org/name@revision:subfolder" in refused(text)
    assert hub.requests == []


@pytest.mark.parametrize(
    "text", ["a b/c", "-x/y", "--offline/x", "a/b.safetensors", "tests/no-such-model", "a/b/c"]
)
def test_paths_are_no_models_of_a_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    assert "there is no file" in refused(text)
    with pytest.raises(CheckpointError, match="there is no file"):
        open_model(Path(REPOSITORY))
    assert hub.requests == []


def test_links_of_the_cache_are_followed_into_the_cache_alone(tmp_path: Path) -> None:
    """Blobs lie in the repository's folder or, shared by repositories, in that of the cache."""
    cache = tmp_path / "hub"
    folder = cache / "models--org--name" / "snapshots" / ("0" * 40) / "deep"
    source = write_example_checkpoint(tmp_path / "source")
    folder.mkdir(parents=True)
    for place, fine in (
        (cache / "models--org--name" / "blobs", True), (cache / "blobs" / "ab", True),
        (tmp_path / "blobs", False),
    ):  # fmt: skip
        place.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink(missing_ok=True)
            (place / name).write_bytes((source / name).read_bytes())
            (folder / name).symlink_to(place / name)
        if fine:
            open_model(folder).close()
        else:
            with pytest.raises(CheckpointError, match="link that leads out"):
                open_model(folder)
