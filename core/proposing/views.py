"""What a proposer is shown of a step, built from what the step committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.sdk.extensions import RejectedTokens, TargetTokens, Trees
from specdec.sdk.needs import Needs
from specdec.sdk.types import PADDING_TOKEN_ID, KeptTokens, SamplingView, StepView, TargetInfo, TokenHistory

from ..cache.transfer import RowLists, upload
from ..kernels.backend import backend_of
from ..request.request import COLUMNS, Committed
from .top_tokens import HOST, TopTokens, rejected_on_device, rejected_on_host
from .tree_views import accepted_nodes, kept_first, kept_places


class Computed(NamedTuple):
    """What one forward pass shows of its whole batch."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    hidden: Sequence[Tensor] = ()  # L of [N, H]
    top: TopTokens | None = None  # the target's most likely tokens after them


@dataclass(frozen=True)
class StepRandom:
    """The draft stream of a step's requests: keys derived from their seeds, positions of their next tokens."""

    keys: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    num_draft_tokens: int  # K: so many draws are made at once, with the first of them

    def uniform(self, draft_index: int) -> Tensor:
        """Draw one number in (0, 1) per request for the draft token at `draft_index`: [B] float64."""
        if draft_index < self.num_draft_tokens:
            return self._of_a_draft[draft_index]
        return self._first(draft_index + 1)[draft_index]

    @cached_property
    def _of_a_draft(self) -> Tensor:  # [K, B]
        return self._first(self.num_draft_tokens)

    def _first(self, count: int) -> Tensor:
        return backend_of(self.keys.device.type).draft_uniforms(self.keys, self.positions, count)


@dataclass(frozen=True)
class HostHistory:
    """Read where the engine keeps them: from each request's list."""

    committed: Sequence[Committed]

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        each = self.committed[request]
        return each.request.token_ids[start : each.length]

    def of(self, request: int, start: int = 0) -> Tensor:
        return torch.tensor(self.token_ids(request, start), dtype=torch.int64)

    def tail(self, num_tokens: int) -> Tensor:
        ends = [self.token_ids(b, max(each.length - num_tokens, 0)) for b, each in enumerate(self.committed)]
        padded = [[PADDING_TOKEN_ID] * (num_tokens - len(end)) + end for end in ends]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(ends), num_tokens)


@dataclass(frozen=True)
class DeviceHistory:
    """Read from a table on the device."""

    table: Tensor  # [max_num_seqs, max_model_len] int64, by slot
    slots: Tensor  # [B]
    lengths: Tensor  # [B]

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        return self.of(request, start).tolist()

    def of(self, request: int, start: int = 0) -> Tensor:
        return self.table[self.slots[request], start : int(self.lengths[request])].clone()

    def tail(self, num_tokens: int) -> Tensor:
        places = self.lengths[:, None] + torch.arange(-num_tokens, 0, device=self.lengths.device)
        return self.table[self.slots[:, None], places.clamp(min=0)].masked_fill(places < 0, PADDING_TOKEN_ID)


class ViewBuilder:
    """Builds the view that one proposer declared to need, and keeps the token history where a device reads it.

    Host form: kept tokens only. Device form: every computed row of the requests that go on.
    """

    def __init__(self, needs: Needs, width: int, info: TargetInfo, device: torch.device) -> None:
        self.needs, self._info = needs, info
        self.width = width
        self.device = device if needs.placement == "device" else HOST
        tokens = needs.extension(TargetTokens)
        self.num_top = tokens.top_k if tokens else 0  # of the target's most likely tokens
        self._shows_rejected = tokens is not None and tokens.rejected
        self._draws_trees = needs.extension(Trees) is not None
        shown = {"history": needs.history, "hidden": needs.hidden_states, "sampling": needs.sampling}
        shown |= {"top_ids": tokens, "top_logprobs": tokens, "rejected": self._shows_rejected}
        self.absent = frozenset(name for name, declared in shown.items() if not declared)  # from the views
        self._table: RowLists | None = None  # of the tokens of every running request
        if needs.history and needs.placement == "device":
            size = info.max_num_seqs, info.max_model_len
            self._table = RowLists(torch.zeros(size, dtype=torch.int64, device=self.device))

    def build(
        self,
        committed: Sequence[Committed],
        budgets: Sequence[int],
        batch: Computed,
        *,
        may_pad: bool = False,
    ) -> tuple[StepView, Tensor]:
        """The view of the requests that go on, perhaps none, and their rows [B] where no proposer can write to them.

        may_pad: whether a draft pass may write past a request's blocks, where nobody reads it.
        """
        if self.needs.placement == "host":
            return self._host_view(committed, budgets, batch)
        return self._device_view(committed, budgets, batch, may_pad)

    def idle(self) -> StepView:
        """The view of a step without requests."""
        none, needs, info = torch.zeros(0, dtype=torch.int64), self.needs, self._info
        hidden = torch.zeros(0, info.hidden_size, dtype=getattr(torch, info.dtype))
        top = TopTokens.of(hidden.new_zeros(0, info.vocab_size), none, 0, self.num_top) if self.num_top else None
        return self.build([], [], Computed(none, none, [hidden] * len(needs.hidden_states), top))[0]

    def _host_view(
        self, committed: Sequence[Committed], budgets: Sequence[int], batch: Computed
    ) -> tuple[StepView, Tensor]:
        hidden, top = batch.hidden, batch.top
        places = kept_places(committed) if hidden or top else []
        if hidden:
            rows = _if_not_all(places, batch)
            chosen = upload([rows], hidden[0].device)[0] if rows else None
            hidden = [(state if chosen is None else state[chosen]).to(HOST) for state in hidden]
        kept = _columns(committed, [each.num_kept for each in committed]) | _kept_tokens(committed)
        sent = self._sent(committed, budgets, kept)
        top = top and top.on_host()
        tops = top.fields_on_host(places) if top else {}
        shown = KeptTokens(**{name: sent[name] for name in kept}, hidden=tuple(hidden), most_tokens=None, **tops)
        rejected = rejected_on_host(committed, top) if top and self._shows_rejected else None
        history = HostHistory(committed) if self.needs.history else None
        return self._view(committed, sent, shown, rejected, history), sent["own_slots"]

    def _sent(
        self, committed: Sequence[Committed], budgets: Sequence[int], more: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        """Send, in one transfer, the lists that every view has, and more lists. Returns tensors by name."""
        lists: dict[str, Sequence[int]] = {name: list(map(fact, committed)) for name, fact in COLUMNS.items()}
        lists |= {"budget": budgets, "own_slots": lists["slots"], **more}
        if self._draws_trees:
            lists["accepted_nodes"] = accepted_nodes(committed, self.width)
        lists["draft_key"] = [each.request.draft_key for each in committed]
        sampling = {name: [getattr(each.request.params, name) for each in committed] for name in self.needs.sampling}
        if "top_k" in sampling:
            lists["top_k"] = sampling.pop("top_k")
        sent = upload(list(lists.values()), self.device, list(sampling.values()))
        return dict(zip([*lists, *sampling], sent, strict=True))

    def _view(
        self,
        committed: Sequence[Committed],
        sent: Mapping[str, Tensor],
        kept: KeptTokens,
        rejected: RejectedTokens | None,
        history: TokenHistory | None,
    ) -> StepView:
        columns: dict[str, Any] = {name: sent[name] for name in (*COLUMNS, "budget")}
        return StepView(
            requests=tuple([each.request.view for each in committed]),
            width=self.width,
            **columns,
            kept=kept,
            random=StepRandom(sent["draft_key"], sent["committed_length"], self.width),
            sampling=self._sampling(committed, sent) if self.needs.sampling else None,
            history=history,
            accepted_nodes=sent["accepted_nodes"].view(len(committed), self.width) if self._draws_trees else None,
            rejected=rejected,
        )

    def _device_view(
        self, committed: Sequence[Committed], budgets: Sequence[int], batch: Computed, may_pad: bool
    ) -> tuple[StepView, Tensor]:
        new_places, new_tokens = list[int](), list[int]()
        if self._table:
            owned = ((each.row, each.generation, each.request.token_ids) for each in committed)
            new_places, new_tokens = self._table.changes(owned)
        places = _if_not_all(kept_first(committed), batch)
        kept = _columns(committed, [each.num_rows for each in committed])
        more = {"new_places": new_places, "new_tokens": new_tokens, "places": places}
        if self._shows_rejected:
            more["num_rejected"] = [each.num_drafted - each.num_accepted for each in committed]
        sent = self._sent(committed, budgets, kept | more)
        token_ids, positions, hidden, top = batch
        if places:
            token_ids, positions = token_ids[sent["places"]], positions[sent["places"]]
            hidden = [state[sent["places"]] for state in hidden]
        shown = KeptTokens(
            **{name: sent[name] for name in kept},
            positions=positions,
            token_ids=token_ids,
            hidden=tuple([state.to(self.device) for state in hidden]),
            most_tokens=max([each.num_rows for each in committed], default=0) if may_pad else None,
            **(top.fields(sent["places"] if places else None) if top else {}),
        )
        rejected = rejected_on_device(shown, sent["num_rejected"]) if self._shows_rejected else None
        history = None
        if self._table:
            self._table.write(sent["new_places"], sent["new_tokens"])
            history = DeviceHistory(self._table.table, sent["slots"], sent["committed_length"])
        return self._view(committed, sent, shown, rejected, history), sent["own_slots"]

    def _sampling(self, committed: Sequence[Committed], sent: Mapping[str, Tensor]) -> SamplingView:
        """The declared parameters. An adapter shows its engine's."""
        all_greedy = all(each.request.params.greedy for each in committed)
        return SamplingView(**{name: sent[name] for name in self.needs.sampling}, all_greedy=all_greedy)


def _if_not_all(places: list[int], batch: Computed) -> list[int]:
    """The places in the batch that are shown; none if all of them are."""
    return [] if places == list(range(len(batch.positions))) else places


def _columns(committed: Sequence[Committed], counts: Sequence[int]) -> dict[str, list[int]]:
    """Columns of so many rows of each request: the token after each is -1 behind those that survived."""
    next_token_ids: list[int] = []
    for each, count in zip(committed, counts, strict=True):
        first = each.first_position + 1
        next_token_ids += each.request.token_ids[first : first + each.num_kept]
        next_token_ids += [-1] * (count - each.num_kept)
    return {
        "token_offsets": list(accumulate(counts, initial=0)),
        "num_kept": [each.num_kept for each in committed],
        "kept_start": [each.first_position for each in committed],
        "next_token_ids": next_token_ids,
    }


def _kept_tokens(committed: Sequence[Committed]) -> dict[str, list[int]]:
    """Columns of the rows that survived, whose tokens the host knows."""
    positions: list[int] = []
    token_ids: list[int] = []
    for each in committed:
        first, stop = each.first_position, each.first_position + each.num_kept
        positions += range(first, stop)
        token_ids += each.request.token_ids[first:stop]
    return {"positions": positions, "token_ids": token_ids}
