"""Documentation pages of all commands, generated from their help when mkdocs builds.

`mkdocs.yml` names this file as a hook: no page is ever older than its command.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

FOLDER = "commands"
PROGRAM = "tnfn"
_EXAMPLES = re.compile(r"\[bold\]Examples?\[/bold\]")


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by the words that call it."""
    from transformer_nfn.cli.app import app

    yield from _below((), typer.main.get_command(app))


def _below(
    words: tuple[str, ...], command: Any
) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, each in inner.items():
        yield from _below((*words, name), each)


def page_path(words: tuple[str, ...]) -> str:
    """Where the page of a command lies, below the documentation."""
    return f"{FOLDER}/{'-'.join(words)}.md"


def page(words: tuple[str, ...], command: Any) -> str:
    """The page of one command: what it does, how it is called, arguments, options, examples."""
    name = " ".join((PROGRAM, *words))
    arguments, options = (
        [p for p in command.params if p.param_type_name == kind and not getattr(p, "hidden", False)]
        for kind in ("argument", "option")
    )
    usage = " ".join([name, *(_metavar(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
    text, examples = _text(command)
    lines = [f"# `{name}`", "", *text, "```console", f"$ {usage}", "```", ""]
    lines += _table("Arguments", arguments)
    lines += _table("Options", options)
    if examples:
        lines += ["## Examples", "", "```console", *(f"$ {line}" for line in examples), "```", ""]
    return "\n".join(lines)


def _text(command: Any) -> tuple[list[str], list[str]]:
    """The paragraphs of a help text as Markdown, and the examples that end it."""
    from transformer_nfn.cli.console import paragraphs

    text: list[str] = []
    examples: list[str] = []
    for block in paragraphs(command.help or ""):
        if not block.startswith(" "):
            text += [] if _EXAMPLES.fullmatch(block) else [block, ""]
        elif block.lstrip().startswith(f"{PROGRAM} "):
            examples += [line.strip() for line in block.splitlines()]
        else:
            text += ["```text", inspect.cleandoc(block), "```", ""]
    return text, examples


def _table(title: str, parameters: list[Any]) -> list[str]:
    if not parameters:
        return []
    head = [f"## {title}", "", "| | |", "|---|---|"]
    return [*head, *(f"| {_names(p)} | {_help(p)} |" for p in parameters), ""]


def _metavar(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).removesuffix("...")
    name = f"{name}..." if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _help(parameter: Any) -> str:
    words = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    if parameter.required:
        return f"{words} Required." if parameter.param_type_name == "option" else words
    if default is None or default is False or default == () or default == []:
        return words
    return f"{words} Default: `{default}`."


def overview() -> str:
    """The page that lists all commands."""
    lines = ["# Commands", "", "Every command says the same of itself with `--help`.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    for words, command in commands():
        first = _text(command)[0][0]
        name = page_path(words).removeprefix(f"{FOLDER}/")
        lines.append(f"| [`{' '.join((PROGRAM, *words))}`]({name}) | {first} |")
    return "\n".join([*lines, ""])


def pages() -> dict[str, str]:
    """All pages by their path below the documentation."""
    made = {page_path(words): page(words, command) for words, command in commands()}
    return {f"{FOLDER}/index.md": overview(), **made}


def on_config(config: Any) -> Any:
    """Puts the pages into the navigation, before the reference."""
    section = {"Commands": list(pages())}
    place = next(i for i, entry in enumerate(config.nav) if "Reference" in entry)
    config.nav.insert(place, section)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to what is built."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
