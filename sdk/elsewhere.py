"""Which proposers can run in another process than the target."""

from __future__ import annotations

from .errors import PluginId, Refusal
from .needs import Needs

READ_FROM_THE_TARGET = ("hidden_states", "target_top_k", "rejected_rows", "target_kv", "target_layers")
"""Needs of what only the target's process has."""


def refuse_what_reads_the_target(needs: Needs, plugin: PluginId) -> None:
    """Raise Refusal for a proposer that reads more of the target than its tokens."""
    read = [name for name in READ_FROM_THE_TARGET if getattr(needs, name)]
    if read:
        reason = f"it reads the target itself ({', '.join(read)}), which runs in another process"
        raise Refusal(reason, "a proposer that reads tokens, or this one in the engine's process", plugin=plugin)
