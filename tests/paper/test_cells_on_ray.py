"""Tables filled on a real local Ray cluster: the same table, and errors as clear."""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from transformer_nfn.paper.tables import reproduce
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import Settings, build

MODELS = ["statnn", "lightgbm"]

# In a process of its own: Ray's warnings and threads are not this test's to judge.
_DRIVER = """
import json, sys
from pathlib import Path
import torch
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.paper.tables import reproduce

import ray
torch.set_num_threads(1)
zoo, out, models = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
how = dict(epochs=2, models=models, engine="ray")
told = []
reproduce("table1", zoo, out, seeds=[0, 1], progress=lambda c, line: told.append(c.folder), **how)
try:
    reproduce("table1", zoo, out, seeds=[2], **how)
except TransformerNFNError as error:
    print(json.dumps({"told": told, "error": str(error)}))
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "digits"
    return build(path, Settings(task="digits", runs=28, epochs=4, samples=200), workers=1)


def test_ray_fills_the_same_table(zoo, tmp_path):
    reproduce(
        "table1",
        zoo.path,
        tmp_path / "local",
        seeds=[0, 1],
        epochs=2,
        models=MODELS,
    )
    quiet = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}
    driver = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(zoo.path), str(tmp_path / "ray"), json.dumps(MODELS)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | quiet,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert driver.returncode == 0, driver.stderr
    tables = [pq.read_table(tmp_path / engine / "table1.parquet") for engine in ("local", "ray")]
    assert tables[0].equals(tables[1])
    assert tables[0]["value"].drop_null().length() >= 2, "some cells have enough networks"
    texts = [(tmp_path / engine / "table1.md").read_text() for engine in ("local", "ray")]
    assert texts[0] == texts[1]
    said = json.loads(driver.stdout.splitlines()[-1])
    assert len(said["told"]) == 10, "every cell is reported once"
    assert "holds another run" in said["error"]
    assert "\n" not in said["error"], "one sentence, without the worker's traceback"


@pytest.mark.usefixtures("no_ray_cluster")
def test_no_cluster_is_one_clear_error(zoo, tmp_path, monkeypatch):
    def fill(**options):
        reproduce("table5", zoo.path, tmp_path, seeds=[0], engine="ray", **options)

    with pytest.raises(RunError, match=r"no Ray cluster at 10\.0\.0\.1:1"):
        fill(address="10.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"pip install 'transformer-nfn\[ray\]'"):
        fill()
