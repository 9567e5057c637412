"""Which proposers can run in another process than the target."""

from __future__ import annotations

from .errors import PluginId, Refusal
from .extensions import Grammars, TargetKV, TargetLayers, TargetTokens
from .needs import Needs

READ_THE_TARGET = (TargetTokens, TargetKV, TargetLayers, Grammars)
"""Extensions of what only the target's process has."""


def refuse_what_reads_the_target(needs: Needs, plugin: PluginId) -> None:
    """Raise Refusal for a proposer that reads more of the target than its tokens."""
    read = [each.id for each in needs.asked if isinstance(each, READ_THE_TARGET)]
    if needs.hidden_states:
        read.insert(0, "hidden_states")
    if read:
        reason = f"it reads the target itself ({', '.join(read)}), which runs in another process"
        raise Refusal(reason, "a proposer that reads tokens, or this one in the engine's process", plugin=plugin)
