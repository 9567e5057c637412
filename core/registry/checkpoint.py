"""A checkpoint without a `method`: it says itself, through plugins, which proposer it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecError

from .attribution import attributing

TELLING_KEYS = ("model_type", "architectures", "speculators_model_type")


@dataclass(frozen=True)
class Recogniser:
    """A plugin's statement of which checkpoints a proposer is for."""

    proposer: str
    recognises: Callable[[Checkpoint], bool]
    plugin: PluginId  # who made the statement


def recognise(checkpoint: Checkpoint, recognisers: tuple[Recogniser, ...]) -> str:
    """The name of the one proposer that the checkpoint is for.

    Raises PluginLoadError: SD-E107 if none or more than one claims it, SD-E108 if a recogniser raised.
    """
    claims: dict[str, PluginId] = {}
    for recogniser in recognisers:
        doing = f'reading the checkpoint "{checkpoint.directory}", plugin'
        with attributing("SD-E108", doing, recogniser.plugin, SpecdecError):
            if recogniser.recognises(checkpoint):
                claims[recogniser.proposer] = recogniser.plugin
    if len(claims) == 1:
        return next(iter(claims))
    asked = ", ".join(dict.fromkeys(item.proposer for item in recognisers))
    config = checkpoint.config
    told = {key: config[key] for key in TELLING_KEYS if key in config}
    facts = {
        "found": told or f"keys {', '.join(config) or 'none'}",
        "claimed by": ", ".join(f"{name} [{plugin}]" for name, plugin in claims.items()) or "nobody",
        "asked": asked or "nobody: no installed plugin says which checkpoints it is for",
        "fix": 'name the proposer: "method": "NAME"',
    }
    problem = "more than one proposer is" if claims else "no proposer is known to be"
    raise PluginLoadError("SD-E107", f'{problem} for the checkpoint "{checkpoint.directory}"', facts)
