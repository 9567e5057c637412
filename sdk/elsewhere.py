"""Which proposers can run in another process than the target."""

from __future__ import annotations

from .errors import PluginId, Refusal
from .extensions import Grammars, TargetKV, TargetLayers, TargetTokens
from .needs import Needs

READ_THE_TARGET = (TargetTokens, TargetKV, TargetLayers, Grammars)
"""Extensions of what only the target's process has."""


def refuse_what_reads_the_target(needs: Needs, plugin: PluginId, *, shares_memory: bool) -> None:
    """Raise Refusal for a proposer that reads more of the target than its tokens.

    shares_memory: whether hidden states can be handed over: to a process of the engine's own.
    """
    read = [each.id for each in needs.asked if isinstance(each, READ_THE_TARGET)]
    if needs.hidden_states and not shares_memory:
        read.insert(0, "hidden_states")
    if read:
        reason = f"it reads the target itself ({', '.join(read)}), which runs in another process"
        works = "a proposer that reads tokens, or this one in the engine's process"
        if read == ["hidden_states"]:
            works += ', or in one of its own ("isolation": "process")'
        raise Refusal(reason, works, plugin=plugin)
