"""The root of the command line: which commands there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import typer

from transformer_nfn import __version__
from transformer_nfn.cli.align import align_command
from transformer_nfn.cli.compare import compare_command
from transformer_nfn.cli.console import HelpTyper, RootCommand
from transformer_nfn.cli.demo import demo_command
from transformer_nfn.cli.diff import diff_command
from transformer_nfn.cli.disguise import disguise_command
from transformer_nfn.cli.fingerprint import fingerprint_command
from transformer_nfn.cli.inspect import inspect_command
from transformer_nfn.cli.listings import architectures_command, assets_command, models_command
from transformer_nfn.cli.report import report_command
from transformer_nfn.cli.reproduce import reproduce_command
from transformer_nfn.cli.train import evaluate_command, predict_command, train_command
from transformer_nfn.cli.zoo import zoo_app

PANELS: Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]] = {
    "Checkpoints": {
        "compare": compare_command,
        "diff": diff_command,
        "disguise": disguise_command,
        "fingerprint": fingerprint_command,
        "align": align_command,
        "inspect": inspect_command,
        "architectures": architectures_command,
    },
    "Prediction": {
        "predict": predict_command,
        "evaluate": evaluate_command,
        "train": train_command,
        "models": models_command,
        "assets": assets_command,
    },
    "Zoos": {"zoo": zoo_app},
    "The paper": {
        "demo": demo_command,
        "reproduce": reproduce_command,
        "report": report_command,
    },
}
"""Panels of `tnfn --help`, and the commands in each."""
OFFLINE = "--offline"


class Root(RootCommand):
    """The root command, which lists commands by panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; ``--offline`` may stand anywhere."""
        words = [word for word in args if word != OFFLINE]
        return super().parse_args(ctx, [OFFLINE, *words] if words != args else words)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of `PANELS`."""
        return [name for names in PANELS.values() for name in names]


app = HelpTyper(
    name="tnfn",
    cls=Root,
    help="Reads the weights of transformers: symmetries, comparison, prediction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"transformer-nfn {__version__}")
        raise typer.Exit


def _forbid_network(value: bool) -> None:
    if value:
        from transformer_nfn.io.downloads import OFFLINE_VARIABLE

        os.environ[OFFLINE_VARIABLE] = "1"


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
    offline: bool = typer.Option(
        False,
        OFFLINE,
        callback=_forbid_network,
        is_eager=True,
        help="Use no network, only what is on this machine; also after a command.",
    ),
) -> None:
    """Reads the weights of transformers."""
