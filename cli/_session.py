"""What the common flags say, handed to a verb as `ctx.obj`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.core.registry.discovery import PluginSettings

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.lab.progress import NoProgress

WIDTH_IN_A_PIPE = 200


@dataclass(frozen=True)
class Session:
    """One run of the command."""

    settings: PluginSettings
    colour: bool = True
    quiet: bool = False  # --quiet before the verb

    def console(self) -> Console:
        """A rich console on standard output."""
        from rich.console import Console

        fitting = sys.stdout.isatty() or "COLUMNS" in os.environ
        return Console(
            no_color=True if not self.colour else None,
            highlight=False,
            width=None if fitting else WIDTH_IN_A_PIPE,
        )

    def progress(self, *, quiet: bool) -> NoProgress:
        """How far a run is, on standard error."""
        from rich.console import Console

        from specdec.lab.progress import progress_for

        return progress_for(Console(stderr=True, no_color=True if not self.colour else None), quiet=quiet)
