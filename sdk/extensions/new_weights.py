"""New weights while requests run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from ..config import Extension

if TYPE_CHECKING:
    from torch import Tensor


class NewWeightsMethods(Protocol):
    """The method of a proposer that asks for `NewWeights`."""

    def update_weights(self, tensors: Mapping[str, Tensor], /) -> None:
        """Take new weights, by the names of the checkpoint's tensors. Tensors that are not named stay.

        Called between steps, from `LLM.update_proposer_weights`. Requests go on, and drafts that wait for their
        verification are dropped before the next step. What the proposer computed with the old weights, such as draft
        KV, is its own to keep or to drop. Raise ConfigError for tensors that do not fit, and change nothing then.
        """
        ...


class NewWeights(Extension):
    """New weights are taken while requests run: `update_weights` is called."""

    name: ClassVar[str] = "new_weights"
    version: ClassVar[int] = 1
    methods: ClassVar[type | None] = NewWeightsMethods
