"""The `specdec` command. Every module here without a leading underscore is a verb: its function `command`.

Verbs import what is heavy inside that function, so that `specdec --help` loads no torch.
"""

from ._app import main

__all__ = ["main"]
