"""What one request tells the proposer: `extra_args["specdec"]`, read by the class's RequestOptions.

The rest of `extra_args` is somebody else's: an engine's, or another plugin's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .config import StrictModel
from .errors import ConfigError, PluginId, PluginLoadError, RequestError

REQUEST_SECTION = "specdec"
"""The key of `extra_args` below which everything of ours stands."""

REQUEST_SECTION_PLACE = f'extra_args["{REQUEST_SECTION}"]'


def request_options_model(cls: type, plugin: PluginId) -> type[StrictModel] | None:
    """The class's RequestOptions. None means that it has none.

    Raises PluginLoadError SD-E271 if it is no StrictModel, or if a request has to give one of its values.
    """
    model = getattr(cls, "RequestOptions", None)  # optional by contract
    if model is None:
        return None
    if not (isinstance(model, type) and issubclass(model, StrictModel)):
        expected = "a nested class RequestOptions(StrictModel), from specdec.sdk import StrictModel"
        facts = {"expected": expected, "found": repr(model)}
        raise PluginLoadError("SD-E271", f"{cls.__name__}.RequestOptions is no StrictModel", facts, plugin=plugin)
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    if required:
        facts = {"without a default": ", ".join(required), "fix": "give each a default: most requests say nothing"}
        summary = f"{cls.__name__}.RequestOptions requires values of every request"
        raise PluginLoadError("SD-E271", summary, facts, plugin=plugin)
    return model


def read_request_options(
    model: type[StrictModel] | None, extra_args: Mapping[str, Any], request_id: str, plugin: PluginId
) -> BaseModel | None:
    """An instance of `model` made of a request's `extra_args["specdec"]`.

    model: a class's RequestOptions. None means that it has none; the section is then read by nobody here.
    Raises RequestError SD-E270 for unknown keys, unusable values, keys of `model` that stand beside the section, and
    whatever a validator of `model` raises.
    """
    if model is None:
        return None
    try:
        _require_below(model, extra_args)
        return model.parse(_section(extra_args), REQUEST_SECTION_PLACE)
    except ConfigError as error:
        summary = f"request {request_id!r}: {error.summary}"
        raise RequestError("SD-E270", summary, error.facts, plugin=plugin) from error.__cause__
    except Exception as error:  # of a validator that the plugin wrote
        facts = {"because": f"{type(error).__name__}: {error}"}
        summary = f"request {request_id!r}: its options cannot be read"
        raise RequestError("SD-E270", summary, facts, plugin=plugin) from error


def _section(extra_args: Mapping[str, Any]) -> Mapping[str, Any]:
    section = extra_args.get(REQUEST_SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            "SD-E132", f"{REQUEST_SECTION_PLACE} is no mapping", {"expected": "a mapping", "found": repr(section)[:200]}
        )
    return section


def _require_below(model: type[StrictModel], extra_args: Mapping[str, Any]) -> None:
    beside = [key for key in extra_args if key in model.key_names() and key != REQUEST_SECTION]
    if beside:
        facts = {"found": f"extra_args[{beside[0]!r}]", "fix": f"{REQUEST_SECTION_PLACE}[{beside[0]!r}]"}
        raise ConfigError("SD-E132", f"extra_args has an option of the proposer beside {REQUEST_SECTION_PLACE}", facts)
