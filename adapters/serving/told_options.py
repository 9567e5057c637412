"""What a client says of one request to the proposer: its RequestOptions, as a JSON object."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from specdec.core.host import registry
from specdec.sdk.errors import RequestError, SpecdecError

NOT_TAKEN = "SD-E270"
"""The code of an error that is of interest to the request alone."""


def options_of(loaded: registry.LoadedProposer, text: str, name: str) -> BaseModel | None:
    """What the proposer is told. None: its class has no RequestOptions.

    Raises RequestError: SD-E331 for a text that is no JSON object, SD-E270 for options that the proposer does not take.
    """
    section = _as_json(text, name)
    try:
        return loaded.read_request({registry.REQUEST_SECTION: section}, name)
    except SpecdecError:
        raise
    except Exception as error:  # of a validator that the plugin wrote
        facts = {"because": f"{type(error).__name__}: {error}"}
        raise RequestError(NOT_TAKEN, f"request {name!r}: its options cannot be read", facts) from error


def _as_json(text: str, name: str) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError("SD-E331", "a client sent options that are no JSON", {"request": name}) from error
    if isinstance(options, dict):
        return options
    raise RequestError("SD-E331", "a client sent options that are no JSON object", {"request": name})
