"""Python runs this at the start of every process that a judged test starts."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])

sys.path.append(ROOT)
try:
    from scripts.other_processes import begin
finally:
    sys.path.remove(ROOT)
begin()
