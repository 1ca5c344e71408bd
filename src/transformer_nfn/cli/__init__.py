"""The command ``tnfn``: thin commands over the library."""

import os


def main() -> None:
    """Run ``tnfn``; the commands are imported here, so that a fault in that is explained too."""
    from transformer_nfn.cli.endings import explained, leave
    from transformer_nfn.processes import LARGE_PAGES

    with explained():
        # A third of the work on a large model would be page faults of its temporaries.
        os.environ.setdefault(LARGE_PAGES, "1")
        from transformer_nfn.cli.app import app

        leave(app(prog_name="tnfn", standalone_mode=False))


__all__ = ["main"]
