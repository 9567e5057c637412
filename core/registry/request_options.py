"""What one request tells the proposer: `SamplingParams.extra_args`, read by the class's RequestOptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specdec.sdk.config import StrictModel
from specdec.sdk.errors import ConfigError, PluginId, PluginLoadError, RequestError


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
    """An instance of `model` made of a request's extra_args.

    model: a class's RequestOptions. None means that it has none; extra_args are then read by nobody here.
    Raises RequestError SD-E270 for unknown keys and unusable values.
    """
    if model is None:
        return None
    try:
        return model.parse(extra_args, "extra_args")
    except ConfigError as error:
        summary = f"request {request_id!r}: {error.summary}"
        raise RequestError("SD-E270", summary, error.facts, plugin=plugin) from error.__cause__
