"""The root of the command line: which commands there are."""

from __future__ import annotations

from typing import Any

import typer

from transformer_nfn import __version__
from transformer_nfn.cli import (
    align,
    compare,
    demo,
    diff,
    disguise,
    fingerprint,
    inspect,
    listings,
    reproduce,
    spaces,
    train,
)
from transformer_nfn.cli.console import HelpTyper, RootCommand
from transformer_nfn.cli.report import report_command
from transformer_nfn.cli.zoo import zoo_app

PANELS = {
    "Checkpoints": (
        "compare", "diff", "disguise", "fingerprint", "align", "inspect", "architectures",
    ),
    "Prediction": ("predict", "evaluate", "train", "assets"),
    "Zoos": ("zoo",),
    "The paper": ("demo", "reproduce", "report"),
    "Weight spaces": ("space", "sample", "canonical", "disguises"),
}  # fmt: skip
"""Panels of `tnfn --help`, and the commands in each."""


class Root(RootCommand):
    """The root command, which lists commands by panel."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of `PANELS`."""
        for panel, names in PANELS.items():
            for name in names:
                self.commands[name].rich_help_panel = panel  # type: ignore[attr-defined]
        return [name for names in PANELS.values() for name in names]


app = HelpTyper(
    name="tnfn",
    cls=Root,
    help="Reads the weights of transformers: symmetries, comparison, prediction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
demo.register(app)
spaces.register(app)
disguise.register(app)
compare.register(app)
diff.register(app)
fingerprint.register(app)
inspect.register(app)
align.register(app)
app.add_typer(zoo_app, name="zoo")
train.register(app)
reproduce.register(app)
app.command("report")(report_command)
listings.register(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"transformer-nfn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Reads the weights of transformers."""
