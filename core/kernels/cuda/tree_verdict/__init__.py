"""Verifying the trees of each request in one launch; its plain torch form is `rejection.tree.verify_trees`.

The arguments are the groups of `kernels.verdict`, and what trees have besides.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Trees(NamedTuple):
    """All of it is put in."""

    parents: Any  # [B, K] int64, dense
    replacement: Any  # [B] bool, whether siblings were put back; any tensor if none were
    path: Any  # [B, K + 1] int64, of the verdict
