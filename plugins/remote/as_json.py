"""Options that go to another process: those that are the same there, or none."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from specdec.sdk.errors import ConfigError


def as_json(options: BaseModel) -> dict[str, Any]:
    """What was set of them, in JSON. Raises ValueError where they would be read as others: a secret, an infinity."""
    written = options.model_dump(mode="json", exclude_unset=True, by_alias=True, round_trip=True)
    text = json.dumps(written, allow_nan=False, ensure_ascii=False)
    text.encode()  # half a surrogate pair is no text of a message
    found: dict[str, Any] = json.loads(text)
    try:
        read = type(options)(**found)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    changed = [name for name in type(options).model_fields if getattr(read, name) != getattr(options, name)]
    if changed or read != options:
        raise ValueError(f"{', '.join(changed) or 'some'} would be read as something else")
    return found
