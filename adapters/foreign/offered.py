"""Stand-ins for another engine's objects: what they hold is there, anything else is refused by name."""

from __future__ import annotations

from typing import Any, NoReturn


class Offered:
    """An object with these attributes and no others."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._offered_as = name

    def __getattr__(self, attribute: str) -> NoReturn:
        own = ", ".join(key for key in vars(self) if not key.startswith("_")) or "nothing"
        name = vars(self).get("_offered_as", "this")
        raise AttributeError(f"{name}.{attribute} does not exist outside vLLM; {name} has: {own}")
