"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """ "by SIGKILL", or "with exit status 3". status: as `subprocess` gives it, negative for a signal."""
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
