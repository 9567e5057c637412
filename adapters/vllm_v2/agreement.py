"""The same drafts on all tensor-parallel ranks. In V2 each verifies its own: different ones would corrupt the text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sdk.errors import message

logger = logging.getLogger("specdec")


class Agreement:
    """The first rank's drafts and distributions are everybody's. Another rank's own are its proposer's affair."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._told = False

    def on(self, drafts: list[list[int]], num_slots: int) -> list[list[int]]:
        """The first rank's drafts in the place of one's own; a difference is told once."""
        if self._num_ranks == 1:
            return drafts
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        table = torch.tensor([[len(draft), *draft, *[0] * (num_slots - len(draft))] for draft in drafts])
        torch.distributed.broadcast(table, src=group.ranks[0], group=group.cpu_group)
        agreed = [row[1 : 1 + row[0]] for row in table.tolist()]
        if agreed != drafts and not self._told:
            self._told = True
            self._tell(drafts, agreed)
        return agreed

    def on_rows(self, logits: Tensor, rows: Tensor) -> None:
        """The first rank's rows of a table in the place of one's own."""
        if self._num_ranks > 1:
            from vllm.distributed import get_tp_group

            logits[rows] = get_tp_group().broadcast(logits[rows], src=0)

    def _tell(self, own: Sequence[list[int]], agreed: Sequence[list[int]]) -> None:
        pair = next(pair for pair in zip(own, agreed, strict=True) if pair[0] != pair[1])
        facts = {
            "drafted here": str(pair[0]),
            "drafted by the first worker": str(pair[1]),
            "effect": "the first worker's drafts are verified everywhere, and the text is right",
            "fix": "a proposer that is a function of its inputs; random numbers from step.random",
        }
        logger.warning("%s", message("SD-W240", "tensor-parallel workers drafted differently", facts))
