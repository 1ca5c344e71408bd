"""The log of a run as TensorBoard events."""

from __future__ import annotations

from pathlib import Path

from transformer_nfn.errors import missing_extra
from transformer_nfn.io.json_fields import Fields
from transformer_nfn.prediction.log import read_log
from transformer_nfn.prediction.records import LOG_FILE, RunError


def write_events(run: Path) -> Path:
    """Writes ``RUN/tensorboard`` from ``log.jsonl``, one folder a seed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing_extra(
            RunError, "tensorboard", "tensorboard", "writing TensorBoard events"
        ) from error
    log = run / LOG_FILE
    if not log.is_file():
        raise RunError(f"'{run}' has no {LOG_FILE}: trees have no epochs to show")
    lines = read_log(log)
    for line in lines:
        fields = Fields(line, str(log), RunError)
        for key in ("loss", "val_tau", "lr"):
            fields.number(key)
        fields.whole("seed")
    out = run / "tensorboard"
    for seed in sorted({line["seed"] for line in lines}):
        with SummaryWriter(str(out / f"seed-{seed}")) as writer:
            for line in (x for x in lines if x["seed"] == seed):
                for key in ("loss", "val_tau", "lr"):
                    writer.add_scalar(key, line[key], line["epoch"])
    return out
