"""The target's most likely next tokens: at the rows that were kept, and at those that were rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from specdec.sdk.extensions import RejectedTokens
from specdec.sdk.types import PADDING_TOKEN_ID, KeptTokens

from ..cache.transfer import upload
from ..request.request import Committed
from .tree_views import rejected_places

HOST = torch.device("cpu")


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens after every token of a batch, for `KeptTokens.top_ids` and `KeptTokens.top_logprobs`."""

    ids: Tensor  # [N, m] int64
    logprobs: Tensor  # [N, m] float32

    @classmethod
    def of(cls, logits: Tensor, rows: Tensor, num_tokens: int, count: int) -> Self:
        """Choose from logits [R, V], which belong to the tokens `rows` [R] of `num_tokens`. Nothing waits
        for a device.
        """
        precise = logits.float()
        values, ids = precise.topk(count)
        logprobs = values - precise.logsumexp(dim=-1, keepdim=True)
        return cls(
            ids.new_full((num_tokens, count), PADDING_TOKEN_ID).index_copy_(0, rows, ids),
            logprobs.new_full((num_tokens, count), -torch.inf).index_copy_(0, rows, logprobs),
        )

    def on_host(self) -> Self:
        """The same there, after one wait."""
        if self.ids.is_cpu:
            return self
        together = torch.cat([self.ids.double(), self.logprobs.double()], dim=1)  # float64 holds both
        ids, logprobs = together.to(HOST).chunk(2, dim=1)
        return type(self)(ids.long(), logprobs.float())

    def fields(self, places: Tensor | None = None) -> dict[str, Tensor]:
        """The fields of a view, of the tokens at `places` [n]. None means all of them."""
        ids, logprobs = (self.ids, self.logprobs) if places is None else (self.ids[places], self.logprobs[places])
        return {"top_ids": ids, "top_logprobs": logprobs}

    def fields_on_host(self, places: Sequence[int]) -> dict[str, Tensor]:
        """The fields of a view, of the tokens at places of the batch; of what `on_host` gave."""
        return self.fields(upload([places], HOST)[0])


def rejected_on_host(committed: Sequence[Committed], top: TopTokens) -> RejectedTokens:
    """The drafts that verification rejected, and nothing between them."""
    found = [rejected_places(each) for each in committed]
    counts = [len(places) for places, _ in found]
    positions = [position for _, each in found for position in each]
    token_ids = [token_id for each in committed for token_id in each.draft_token_ids[each.num_accepted :]]
    before = list(accumulate(counts, initial=0))[:-1]
    sent = upload([before, counts, positions, token_ids], HOST)
    shown = top.fields_on_host([place for places, _ in found for place in places])
    names = ("start", "num_rejected", "positions", "token_ids")
    return RejectedTokens(**dict(zip(names, sent, strict=True)), **shown)


def rejected_on_device(kept: KeptTokens, num_rejected: Tensor) -> RejectedTokens:
    """The rows behind each request's kept ones. num_rejected: of each request, [B]."""
    assert kept.top_ids is not None, "asked for with them"
    assert kept.top_logprobs is not None, "it comes with top_ids"
    return RejectedTokens(
        start=kept.token_offsets[:-1] + kept.num_kept,
        num_rejected=num_rejected,
        positions=kept.positions,
        token_ids=kept.token_ids,
        top_ids=kept.top_ids,
        top_logprobs=kept.top_logprobs,
    )
