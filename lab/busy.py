"""Whether other programs want the processors that times are taken on."""

from __future__ import annotations

import os
import sys
from typing import Any

MOST_LOAD = 1.0  # programs that are ready to run, for each processor
MOST_WAITED = 0.05  # share of a proposer's time


def load_per_core() -> float | None:
    """Programs that were ready to run in the last minute, for each processor. None: the system does not tell."""
    return None if sys.platform == "win32" else os.getloadavg()[0] / (os.cpu_count() or 1)


def machine_facts(load: float | None, waited_share: float | None = None) -> dict[str, Any]:
    """What a result says of the machine's other programs.

    load: of `load_per_core`, before anything was measured. waited_share: of the proposers' time, what others took.
    """
    busy = (load or 0.0) > MOST_LOAD or (waited_share or 0.0) > MOST_WAITED
    return {"load_per_core": load, "waited_share": waited_share, "is_busy": busy}
