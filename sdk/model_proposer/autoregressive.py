"""Drafting one token after the other with a network that keeps KV of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .base import ModelProposer
from .each import per_request, width_of
from .sampling import most_likely


@dataclass(frozen=True)
class DraftInputs:
    """What one pass of the network reads. Letters: M inputs of all requests, b requests."""

    token_ids: Tensor  # [M] int64
    positions: Tensor  # [M] int64, where their KV is stored
    hidden: Tensor | None  # [M, L*H], the target's hidden states; None for inputs that are tokens only
    last: Tensor  # [b] int64, the input of each request whose output the next token is read from
    attention: Mapping[str, Any]  # for the network's attention layers


class AutoregressiveProposer(ModelProposer):
    """One pass over what the step committed, then one pass per further draft token.

    The rows of the draft KV are laid out in one of two ways, told by `ROWS_ARE_SHIFTED`:

    * True: row i holds the token after position i, together with the target's hidden states at i. Declare
      `DraftKV(depends_on_next_token=True, rows_per_pass=max(K - 1, 1))`.
    * False: row i holds the token at position i, and nothing of the target. Declare `DraftKV(rows_per_pass=K)`.

    Rows written while drafting are overwritten when the step's outcome is observed, accepted or not: what the draft KV
    holds is always what a fresh pass over the committed tokens would have written.
    """

    ROWS_ARE_SHIFTED: ClassVar[bool]

    @abstractmethod
    def first(self, inputs: DraftInputs) -> Tensor:
        """Run the committed inputs. Returns the states [b, S] at `inputs.last`."""

    @abstractmethod
    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Run one drafted token per request after its previous states [b, S]. Returns the new states [b, S]."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """The logits [b, D] of the token that follows states [b, S]."""

    def bind(self, target: TargetInfo, services: Services) -> None:
        """See `ModelProposer.bind`."""
        super().bind(target, services)
        self._captured_first = services.capture(self._first_each)
        self._captured_pass = services.capture(self._one_each)
        self._captured_logits = services.capture(self.logits)
        self._captured_chain = services.capture(self._chain)

    @torch.inference_mode()
    def observe(self, step: StepView) -> None:
        """Run everything that the step committed; keeps the states that `propose` starts from."""
        width = width_of(step)
        if width is None:
            self._states = self.first(self._shifted(step) if self.ROWS_ARE_SHIFTED else self._tokens(step))
            return
        kept = step.kept
        token_ids = kept.next_token_ids if self.ROWS_ARE_SHIFTED else kept.token_ids
        columns = [token_ids] if kept.hidden is None else [token_ids, kept.hidden]
        places = (step.rows, kept.kept_start, kept.num_kept, step.newest_token)
        self._states = self._captured_first(*places, *per_request(step, width, *columns))

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        chosen = self.wanted(step)
        sampler = self.sampler(step, chosen)
        rows, position, states = step.rows, step.kept.next_position, self._states
        if chosen is not None:
            rows, position, states = rows[chosen], position[chosen], states[chosen]
        if not self.ROWS_ARE_SHIFTED:
            position = position + 1
        budget = self.most_wanted(step)
        if sampler.is_greedy and budget == self.config.num_draft_tokens:
            return sampler.draft_of(self._captured_chain(rows, position, states))
        for index in range(budget):
            token_ids = sampler.draw(self._captured_logits(states))
            if index + 1 < budget:
                states = self._captured_pass(token_ids, rows, position + index, states)
        return sampler.draft()

    def _chain(self, rows: Tensor, positions: Tensor, states: Tensor) -> Tensor:
        """The most likely tokens [b, K], one after the other, from states [b, S]; the first is put at `positions`."""
        drawn = [most_likely(self.logits(states), self.vocabulary)]
        for index in range(self.config.num_draft_tokens - 1):
            states = self._one_each(drawn[-1], rows, positions + index, states)
            drawn.append(most_likely(self.logits(states), self.vocabulary))
        return torch.stack(drawn, dim=1)

    def _first_each(
        self, rows: Tensor, starts: Tensor, num_kept: Tensor, newest: Tensor, token_ids: Tensor, *hidden: Tensor
    ) -> Tensor:
        """The states after the kept entries, the first `num_kept` [b] of token_ids [b, W] and hidden [b, W, L*H].

        What the others write is overwritten before it is read, like the rows of rejected drafts.
        """
        if not self.ROWS_ARE_SHIFTED:  # one input more: the newest token, right behind the kept ones
            places = torch.arange(token_ids.shape[1] + 1, device=rows.device)
            widened = torch.cat([token_ids, newest[:, None]], dim=1)
            token_ids = torch.where(places == num_kept[:, None], newest[:, None], widened)
        count, width = token_ids.shape
        cu_queries = torch.arange(count + 1, device=rows.device) * width
        offsets = torch.arange(width, device=rows.device)
        positions = (starts[:, None] + offsets).clamp(max=self.target.max_model_len - 1).flatten()
        last = cu_queries[:-1] + num_kept - (1 if self.ROWS_ARE_SHIFTED else 0)
        attention = self.services.draft_kv().attention(rows, starts, cu_queries)
        states = hidden[0].flatten(0, 1) if hidden else None
        return self.first(DraftInputs(token_ids.flatten().clamp(min=0), positions, states, last, attention))

    def _one_each(self, token_ids: Tensor, rows: Tensor, positions: Tensor, states: Tensor) -> Tensor:
        """One drafted token per request at `positions` of `rows`; its new states."""
        cu_queries = torch.arange(len(rows) + 1, device=rows.device)
        positions = positions.clamp(max=self.target.max_model_len - 1)  # of rows whose budget is used up
        attention = self.services.draft_kv().attention(rows, positions, cu_queries)
        return self.advance(DraftInputs(token_ids, positions, None, cu_queries[:-1], attention), states)

    def _shifted(self, step: StepView) -> DraftInputs:
        """Row i is (the token after i, the hidden states at i)."""
        kept = step.kept
        attention = self.services.draft_kv().attention(step.rows, kept.kept_start, kept.cu_rows)
        return DraftInputs(kept.next_token_ids.clamp(min=0), kept.positions, kept.hidden, kept.last, attention)

    def _tokens(self, step: StepView) -> DraftInputs:
        """Row i is the token at i: one input more per request, its newest token, right behind its kept rows."""
        kept = step.kept
        device = kept.cu_rows.device
        count = len(step)
        cu_queries = kept.cu_rows + torch.arange(count + 1, device=device)
        total = len(kept.token_ids) + count
        widths = cu_queries[1:] - cu_queries[:-1]
        owner = torch.repeat_interleave(torch.arange(count, device=device), widths, output_size=total)
        offset = torch.arange(total, device=device) - cu_queries[owner]
        source = (kept.cu_rows[owner] + offset).clamp(max=len(kept.token_ids) - 1)
        token_ids = torch.where(offset == kept.num_kept[owner], step.newest_token[owner], kept.token_ids[source])
        attention = self.services.draft_kv().attention(step.rows, kept.kept_start, cu_queries)
        return DraftInputs(token_ids, kept.kept_start[owner] + offset, None, cu_queries[:-1] + kept.num_kept, attention)
