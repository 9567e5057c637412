"""A checkpoint without a `method`: it says itself, through plugins, which proposer it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecError

from .attribution import attributing

if TYPE_CHECKING:
    from .hooks import Offer

TELLING_KEYS = ("model_type", "architectures", "speculators_model_type")


def recognise(checkpoint: Checkpoint, recognisers: Sequence[Offer]) -> str:
    """The name of the one proposer that the checkpoint is for. recognisers: `register_speculator_config`'s offers.

    Raises PluginLoadError: SD-E107 if none or more than one claims it, SD-E108 if a recogniser raised.
    """
    claims: dict[str, PluginId] = {}
    for offer in recognisers:
        doing = f'reading the checkpoint "{checkpoint.directory}", plugin'
        with attributing("SD-E108", doing, offer.plugin, SpecdecError):
            if offer.value(checkpoint):
                claims[offer.name] = offer.plugin
    if len(claims) == 1:
        return next(iter(claims))
    asked = ", ".join(dict.fromkeys(offer.name for offer in recognisers))
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
