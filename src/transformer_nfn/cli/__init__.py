"""The command ``tnfn``: thin commands over the library."""


def main() -> None:
    """Run ``tnfn``; the commands are imported here, so that a fault in that is explained too."""
    from transformer_nfn.cli.endings import explained, leave
    from transformer_nfn.processes import keep_freed_memory

    with explained():
        keep_freed_memory()
        from transformer_nfn.cli.app import app

        leave(app(prog_name="tnfn", standalone_mode=False))


__all__ = ["main"]
