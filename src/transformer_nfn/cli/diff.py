"""The command `diff`: what was changed from one checkpoint to another."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from transformer_nfn.cli.console import echo_result
from transformer_nfn.cli.options import (
    ArchitectureOption,
    BaseOption,
    FamilyOption,
    JsonOption,
    NetworkArgument,
    SetOption,
    open_options,
)


def diff_command(
    first: NetworkArgument,
    second: NetworkArgument,
    third: Annotated[
        str | None,
        typer.Option("--with", metavar="C", help="Explain B as a mixture of A and this model."),
    ] = None,
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    base: BaseOption = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw changes by block and tensor here.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="Write a self-contained HTML page about the changes here."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain what was changed from checkpoint A to B.

    B is aligned to A if it is disguised. Then every tensor has a relative change and its rank:
    merged adapters are of low rank, fine-tunes dense. Also reported are dropped, duplicated and
    re-ordered blocks, added tokens, replaced outputs, pruned units, quantisation grids and, with
    a third model, the shares of a merge.

    [bold]Examples[/bold]

      tnfn diff base/ finetuned/

      tnfn diff base/ merged/ --with other/ --figure changes.png

      tnfn diff base/ suspect/ --json
    """
    from transformer_nfn.checkpoints.differences import diff, draw_difference
    from transformer_nfn.io.files import check_writable
    from transformer_nfn.networks import check_base, resolve_network
    from transformer_nfn.report.difference_page import write_difference_page

    check_writable(figure, page)
    options = open_options(architecture, family, settings, base)
    networks = [resolve_network(name) for name in (first, second, third) if name is not None]
    check_base(networks, options)
    with ExitStack() as stack:
        A, B, *C = (stack.enter_context(network.open_model(options)) for network in networks)
        difference = diff(A, B, *C)
    if figure is not None:
        draw_difference(difference, figure)
    if page is not None:
        write_difference_page(difference, page, (first, second))
    echo_result(difference, as_json)
