"""What one request tells a proposer outside our engine: in keys that another engine does not read, or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from specdec import SamplingParams
from specdec.core.host import registry
from specdec.sdk import ConfigError, StrictModel
from specdec.sdk.config import unknown_keys
from specdec.sdk.errors import PluginId, RequestError
from specdec.sdk.ranges import INT64_MAX, LimitOrZero

logger = logging.getLogger("specdec")

NOT_TAKEN = "SD-E270"
"""The code of an error that is of interest to the request alone."""


class RequestLimits(StrictModel):
    """A request's own fields of ours, under the names of our `SamplingParams`."""

    speculative: bool = True
    num_speculative_tokens: LimitOrZero | None = None


class RequestOptions(NamedTuple):
    """What was read of a request."""

    options: BaseModel | None  # an instance of the class's RequestOptions. None: it has none
    limits: RequestLimits


def read_request(
    loaded: registry.LoadedProposer, extra_args: Mapping[str, Any] | None, request_id: str
) -> RequestOptions:
    """`extra_args["specdec"]`, a mapping or the JSON text of one: ours, and the proposer's own keys.

    Keys beside it are somebody else's. Raises RequestError SD-E270.
    """
    declared = frozenset() if loaded.request_options is None else loaded.request_options.key_names()
    try:
        beside = _all_of(extra_args)
        section = _mapping(beside.get(registry.REQUEST_SECTION, {}))
        limits = {key: value for key, value in section.items() if key in RequestLimits.key_names()}
        own = {key: value for key, value in section.items() if key not in limits}
        unknown = [key for key in own if key not in declared]
        if unknown:
            raise unknown_keys(registry.REQUEST_SECTION_PLACE, unknown, declared | RequestLimits.key_names())
        read = RequestLimits.parse(limits, registry.REQUEST_SECTION_PLACE)
    except ConfigError as error:
        raise _refused(error, request_id, loaded.plugin) from error.__cause__
    return RequestOptions(loaded.read_request(beside | {registry.REQUEST_SECTION: own}, request_id), read)


def read_running(
    loaded: registry.LoadedProposer, extra_args: Mapping[str, Any] | None, request_id: str
) -> RequestOptions:
    """Read a request that runs and cannot be refused any more: it gets no drafts where `read_request` raises."""
    try:
        return read_request(loaded, extra_args, request_id)
    except RequestError as error:
        logger.warning("%s\n  effect  no drafts for this request", error)
        return RequestOptions(loaded.read_request(None, request_id), RequestLimits(speculative=False))


def options_of(loaded: registry.LoadedProposer, text: str, name: str) -> BaseModel | None:
    """What a client says of a request of its own, in `text`. None: the class has no RequestOptions.

    Raises RequestError: SD-E331 for a text that is no JSON object, SD-E270 for options that the proposer does not take.
    """
    try:
        options = dict(_mapping(text or "{}"))
    except ConfigError as error:
        facts = {"request": name, "found": error.facts["found"]}
        raise RequestError("SD-E331", "a client sent options that are no JSON object", facts) from error
    return loaded.read_request({registry.REQUEST_SECTION: options}, name)


def sampled_alike(request_id: str, plugin: PluginId, **theirs: Any) -> SamplingParams:
    """How another engine samples a request that it has accepted. It verifies by itself: only the proposer reads this.

    A request with a number beyond our range gets no drafts.
    """
    try:
        return SamplingParams(**theirs)
    except ConfigError as error:
        logger.warning("%s\n  effect  no drafts for this request", _refused(error, request_id, plugin))
        return SamplingParams(max_tokens=INT64_MAX, speculative=False)


def _all_of(extra_args: object) -> dict[str, Any]:
    """Read them as a mapping. Not every engine has looked at what a client put there."""
    if not isinstance(extra_args, Mapping | None):
        facts = {"expected": "a mapping", "found": repr(extra_args)[:200]}
        raise ConfigError("SD-E132", "the extra arguments of a request are no mapping", facts)
    return dict(extra_args or {})


def _mapping(section: object) -> Mapping[str, Any]:
    """Read the section. It may be a text of JSON: over HTTP, an engine may take no mappings in such keys."""
    found = section
    if isinstance(section, str):
        try:
            found = json.loads(section)
        except (ValueError, RecursionError) as error:
            raise _no_mapping(section, f"this text is no JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise _no_mapping(section, f"found {type(found).__name__}")
    return found


def _no_mapping(section: object, found: str) -> ConfigError:
    facts = {
        "expected": "a mapping, or the JSON text of one",
        "found": f"{str(section)[:200]!r}: {found}",
        "fix": f'"{registry.REQUEST_SECTION}": "{{\\"num_speculative_tokens\\": 2}}"',
    }
    return ConfigError("SD-E132", f"{registry.REQUEST_SECTION_PLACE} is no mapping", facts)


def _refused(error: ConfigError, request_id: str, plugin: PluginId) -> RequestError:
    return RequestError("SD-E270", f"request {request_id!r}: {error.summary}", error.facts, plugin=plugin)
