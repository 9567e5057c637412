"""The grammars of requests whose output is structured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from ..config import Extension

if TYPE_CHECKING:
    from torch import Tensor


class Grammars(Extension):
    """What the grammar of a request allows and forces: `Services.allowed`, `Services.forced`."""

    name: ClassVar[str] = "grammar"
    version: ClassVar[int] = 1


class GrammarServices(Protocol):
    """What `Services` has for it. Each raises Refusal if it was not asked for."""

    def allowed(self, request_id: str, suffix: Sequence[int] = ()) -> Tensor | None:
        """Which tokens may follow the request's newest token and `suffix`: [V] bool on the CPU. None means any.

        All are False where the grammar refuses the suffix itself.
        """
        ...

    def forced(self, request_id: str) -> str:
        """The text that must follow the request's newest token. "" means that nothing is known of it."""
        ...
