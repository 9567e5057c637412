"""A checkpoint without a `method`: its own configuration says, through plugins, which proposer it is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.sdk import ConfigError, PluginId, PluginLoadError

from .blame import plugin_raised

TELLING_KEYS = ("model_type", "architectures", "speculators_model_type")


@dataclass(frozen=True)
class Recogniser:
    """A plugin's statement of which checkpoints a proposer is for."""

    proposer: str
    recognises: Callable[[Mapping[str, Any]], bool]  # of the checkpoint's configuration
    plugin: PluginId  # who made the statement


def read_checkpoint_config(model: str) -> Mapping[str, Any]:
    """The config.json of a checkpoint directory or hub id.

    Raises ConfigError: SD-E105 if there is none, SD-E106 if it is not a JSON object.
    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        path = _from_hub(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("SD-E106", f"{path} is not JSON", {"error": error}) from error
    if not isinstance(config, dict):
        raise ConfigError("SD-E106", f"{path} is not a JSON object", {"found": type(config).__name__})
    return config


def recognise(model: str, config: Mapping[str, Any], recognisers: tuple[Recogniser, ...]) -> str:
    """The name of the one proposer that the checkpoint is for.

    Raises PluginLoadError: SD-E107 if none or more than one claims it, SD-E108 if a recogniser raised.
    """
    claims: dict[str, PluginId] = {}
    for recogniser in recognisers:
        try:
            if recogniser.recognises(config):
                claims[recogniser.proposer] = recogniser.plugin
        except Exception as error:
            doing = f'reading the checkpoint "{model}", plugin'
            raise plugin_raised("SD-E108", doing, error, recogniser.plugin) from error
    if len(claims) == 1:
        return next(iter(claims))
    asked = ", ".join(dict.fromkeys(item.proposer for item in recognisers))
    told = {key: config[key] for key in TELLING_KEYS if key in config}
    facts = {
        "found": told or f"keys {', '.join(config) or 'none'}",
        "claimed by": ", ".join(f"{name} [{plugin}]" for name, plugin in claims.items()) or "nobody",
        "asked": asked or "nobody: no installed plugin says which checkpoints it is for",
        "fix": 'name the proposer: "method": "NAME"',
    }
    problem = "more than one proposer is" if claims else "no proposer is known to be"
    raise PluginLoadError("SD-E107", f'{problem} for the checkpoint "{model}"', facts)


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    facts = {"directory": f"{Path(model).expanduser().resolve()} has no config.json"}
    try:
        return Path(hf_hub_download(model, "config.json"))
    except HFValidationError:
        facts["hub"] = "this is no hub id"
    except Exception as error:
        facts["hub"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    facts["fix"] = 'give a directory or hub id that exists ("model"), and name the proposer ("method")'
    raise ConfigError("SD-E105", f'there is no checkpoint "{model}"', facts)
