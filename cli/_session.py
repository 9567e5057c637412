"""What the common flags say, handed to a verb as `ctx.obj`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.core.registry.discovery import PluginSettings

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_IN_A_PIPE = 200


@dataclass(frozen=True)
class Session:
    """One run of the command."""

    settings: PluginSettings
    colour: bool = True

    def console(self) -> Console:
        """A rich console on standard output."""
        from rich.console import Console

        fitting = sys.stdout.isatty() or "COLUMNS" in os.environ
        return Console(
            no_color=True if not self.colour else None,
            highlight=False,
            width=None if fitting else WIDTH_IN_A_PIPE,
        )
