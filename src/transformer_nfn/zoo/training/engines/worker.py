"""A worker process of the local engine: claims shards, trains, reports as lines of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.zoo.store import Folder
from transformer_nfn.zoo.training.engines.local import claim_and_train
from transformer_nfn.zoo.training.plan import Plan


class LineProgress:
    """Progress as lines on standard output; a parent that died breaks the pipe and ends us."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """Not a worker's to say."""

    def trained(self, network_epochs: int) -> None:
        """So many networks did one more epoch each."""
        say("trained", network_epochs)

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard is on disk."""
        say("finished", shard, runs, crashed)

    def note(self, text: str) -> None:
        """Every worker would say it; the parent sees the shards itself."""


def say(kind: str, *arguments: object) -> None:
    """One line for the parent."""
    body = arguments[0] if kind == "error" else arguments
    sys.stdout.write(json.dumps({"kind": kind, "arguments": body}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Works on the folder named by the order in the first argument."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        plan = Plan(Folder.open(order["folder"]))
        data = None if order["data"] is None else Path(order["data"])
        claim_and_train(plan, data, order["device"], order["path"], LineProgress())
    except TransformerNFNError as error:
        say("error", str(error))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
