"""The command ``tnfn``: thin commands over the library."""


def main() -> None:
    """Runs ``tnfn``; the commands are imported here, so that a fault in that is explained too."""
    from transformer_nfn.cli.console import explained
    from transformer_nfn.processes import keep_freed_memory

    with explained():
        keep_freed_memory()
        from transformer_nfn.cli.app import app

        app()


__all__ = ["main"]
