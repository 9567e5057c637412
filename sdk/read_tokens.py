"""A request's tokens as they are shown to an author: a list to read, which only its keeper makes longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn


class ReadTokens(list[int]):
    """Reads at a list's own speed. What would change it raises TypeError; slices and copies are plain lists."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("draft only reads the tokens it is given, which stay the base's own: change list(tokens)")

    if not TYPE_CHECKING:  # where it is a list like any other
        append = extend = insert = remove = pop = clear = sort = reverse = _refuse
        __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)

    def commit(self, token_ids: Iterable[int]) -> None:
        """Add what was committed: for the keeper only."""
        super().extend(token_ids)
