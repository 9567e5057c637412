"""The `specdec` command. Every module here without a leading underscore is a verb: its function `command`.

Verbs import what is heavy inside that function, so that `specdec --help` loads no torch.
"""

if __name__ != "specdec.cli":
    raise ImportError(f"import specdec.cli, not {__name__}: one file under two names makes two of every class")

from ._supervised import main

__all__ = ["main"]
