"""Drafting one token after the other with a network that keeps KV of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import ProposerConfig
from ..extensions import MOST_OUTCOMES, Ahead, DraftKV, DraftKVStore, Metrics
from ..needs import Needs, needs_of
from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .ahead import AheadDrafter
from .base import ModelProposer
from .drafts import DraftChain, DraftTrees, Nodes
from .each import per_request, width_of
from .greedy_tree import BEAM
from .kv_shape import draft_kv_of
from .sampling import DrawRule, of_chosen


@dataclass(frozen=True)
class DraftInputs:
    """What one pass of the network reads. Letters: M inputs of all requests, b requests."""

    token_ids: Tensor  # [M] int64
    positions: Tensor  # [M] int64, where their KV is stored
    hidden: Tensor | None  # [M, L*H], the target's hidden states. None means that inputs are tokens only
    last: Tensor  # [b] int64, the input of each request whose output gives the next token
    attention: Mapping[str, Any]  # arguments of the attention layers; empty without draft KV


class AutoregressiveProposer(ModelProposer):
    """One pass over what the step committed, then one pass per further draft token.

    `INPUTS_ARE_SHIFTED` chooses one of two layouts of the draft KV:

    * True: row i holds the token after position i, together with the target's hidden states at i.
    * False: row i holds the token at position i. If hidden states are declared, row i reads those at position i - 1,
      and zeros at position 0.

    `draft_kv` says what to declare. A network without attention keeps no draft KV and declares none. The layouts then
    describe its inputs.

    Observing the step's outcome overwrites the rows that drafting wrote, accepted or not. So the draft KV always holds
    the rows that a fresh pass over the committed tokens would write.

    `first`, `advance` and `logits` may be captured and compiled (`Services.capture`, `Services.compile`). So they must
    be functions of tensors that keep no state.
    """

    INPUTS_ARE_SHIFTED: ClassVar[bool]

    @classmethod
    def draft_kv(cls, config: ProposerConfig, decoder: Mapping[str, Any], num_layers: int | None = None) -> DraftKV:
        """The draft KV of the network's attention layers, with the positions that this base drafts ahead.

        decoder: the network's configuration, with transformers' common names.
        num_layers: attention layers that keep keys and values. None means `num_hidden_layers`.

        Raises Refusal if the configuration states no number of attention heads.
        """
        rows = 1 if config.max_nodes is None else BEAM  # of each depth but the last, which is not run
        return draft_kv_of(
            decoder,
            num_layers=decoder["num_hidden_layers"] if num_layers is None else num_layers,
            lookahead=rows * (config.num_draft_tokens - 1) + (not cls.INPUTS_ARE_SHIFTED),
            dtype=config.network.dtype,
            depends_on_next_token=cls.INPUTS_ARE_SHIFTED,
        )

    @classmethod
    def ahead_needs(cls, config: ProposerConfig, target: TargetInfo, kv: DraftKV) -> Needs | None:
        """What a network that reads tokens alone needs to draft between steps (`Ahead`), where that is offered.

        kv: its draft KV. `INPUTS_ARE_SHIFTED` is False. None means that it drafts as always: nobody offers it, or
        drafts are drawn, or trees, or under grammars.
        """
        if Ahead.id not in target.extensions or config.draft_sample_method != "greedy":
            return None
        if config.max_nodes is not None or config.options.follow_grammars:
            return None
        most = config.num_draft_tokens
        kv = kv.replace(lookahead=most + MOST_OUTCOMES * (most + 1))  # branches lie behind each other
        asked = Ahead(), Metrics()
        return cls.shared_needs(config, target, kv, *asked, placement="host", history=True, state="per_request")

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
        """Bind as `ModelProposer` does, and find the draft KV."""
        super().bind(target, services)
        needs = needs_of(type(self), self.config, target)
        declared = needs.extension(DraftKV)
        self._kv: DraftKVStore | None = None if declared is None else services.draft_kv()
        self._last_hidden: Tensor | None = None
        self._compiled_first = services.compile(self._first_shifted if self.INPUTS_ARE_SHIFTED else self._first_tokens)
        self._compiled_next = services.compile(self._next)
        self._compiled_logits = services.compile(self.logits)
        self._captured_first = services.capture(self._first_each)
        self._chain = DraftChain(self, self._starts, self._drawn)
        self._ahead: AheadDrafter | None = None
        if needs.extension(Ahead) is not None and declared is not None and self._kv is not None:
            run, device = services.compile(self._logits_after), services.device
            self._ahead = AheadDrafter(run, self._kv, declared, self.vocabulary, target, device)
        self._trees = DraftTrees(self, self._starts, self._grow_by_levels)

    def warmup(self) -> None:
        """Warm up as `ModelProposer` does, and prepare drafts behind the last made-up step."""
        super().warmup()
        while self.draft_ahead(2):
            pass

    @torch.inference_mode()
    def observe(self, step: StepView) -> None:
        """Run the tokens that the step committed, and keep the states that `propose` starts from."""
        if not len(step):
            return
        if self._ahead is not None:
            self._ahead.observe(step)
            return
        width = width_of(step)
        if width is None:
            self._states = self._compiled_first(
                *(self._shifted(step) if self.INPUTS_ARE_SHIFTED else self._tokens(step))
            )
            return
        kept = step.kept
        token_ids = kept.next_token_ids if self.INPUTS_ARE_SHIFTED else kept.token_ids
        columns = [token_ids, kept.hidden_cat()] if kept.hidden else [token_ids]
        places = (step.slots, kept.kept_start, kept.num_kept, step.newest_token)
        self._states = self._captured_first(*places, *per_request(step, width, *columns), *self._preceding(step))

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        if self._ahead is not None:
            return self._ahead.propose(step)
        if self.config.max_nodes is not None:
            return self._trees.draft(step)
        return self._chain.draft(step)

    def draft_ahead(self, num_outcomes: int, /) -> bool:
        """Do one pass for the next drafts, where `ahead_needs` was asked for. See `Ahead`."""
        return self._ahead is not None and self._ahead.draft_ahead(num_outcomes)

    def metrics(self) -> Mapping[str, float]:
        """What became of drafts that were prepared."""
        return {} if self._ahead is None else self._ahead.metrics()

    def _logits_after(self, token_ids: Tensor, positions: Tensor, last: Tensor, attention: Mapping[str, Any]) -> Tensor:
        return self.logits(self.first(DraftInputs(token_ids, positions, None, last, attention)))

    def _starts(self, step: StepView, chosen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the position of the first drafted token, and the states before it."""
        starts = step.slots, step.kept.next_position, self._states
        slots, position, states = (of_chosen(each, chosen) for each in starts)
        return slots, position if self.INPUTS_ARE_SHIFTED else position + 1, states

    def _drawn(self, rule: DrawRule, num_tokens: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tokens drawn one after the other. tensors: what `_starts` gave, and numbers. See `DraftChain`."""
        slots, positions, states, *numbers = tensors
        drawing = rule.drawing(numbers, num_tokens)
        drawn = drawing.draw(self._compiled_logits(states))
        for index in range(num_tokens - 1):
            states, logits = self._compiled_next(states, drawn, *self._places(slots, positions + index))
            drawn = drawing.draw(logits)
        return drawing.result()

    def _grow_by_levels(self, found: Nodes, slots: Tensor, positions: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Trees from what `_starts` gave. Node j of those that are run lies j behind the first.

        Each level is one pass over its most likely nodes, each after the states of its parent.
        """
        count = len(slots)
        found.add(self._compiled_logits(states)[:, None], None)
        known = states[:, None]  # [b, 1 + run nodes, S]
        above = positions.new_empty(count, 0)  # [b, run nodes]
        for ahead in range(found.depth - 1):
            level = found.next_level()
            width, first = level.token_ids.shape[1], positions + above.shape[1]
            above = torch.cat([above, level.above], dim=1)
            before = known[torch.arange(count, device=slots.device)[:, None], level.above + 1].flatten(0, 1)
            cu_queries = torch.arange(count + 1, device=slots.device) * width
            attention = {} if self._kv is None else self._kv.attention(slots, first, cu_queries, parents=above)
            places = (positions + ahead).clamp(max=self.target.max_model_len - 1).repeat_interleave(width)
            last = torch.arange(count * width, device=slots.device)
            states = self.advance(DraftInputs(level.token_ids.flatten(), places, None, last, attention), before)
            known = torch.cat([known, states.view(count, width, -1)], dim=1)
            found.add(self.logits(states).view(count, width, -1), level)
        return found.result()

    def _next(
        self, states: Tensor, token_ids: Tensor, positions: Tensor, last: Tensor, attention: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Draft one token per request after what `_places` gave. Returns its new states, and the logits after it."""
        states = self.advance(DraftInputs(token_ids, positions, None, last, attention), states)
        return states, self.logits(states)

    def _places(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        """Positions, last inputs and attention of a pass over one token per request."""
        cu_queries = torch.arange(len(slots) + 1, device=slots.device)
        positions = positions.clamp(max=self.target.max_model_len - 1)  # of rows whose budget is used up
        return positions, cu_queries[:-1], self._attention(slots, positions, cu_queries)

    def _attention(self, slots: Tensor, starts: Tensor, cu_queries: Tensor) -> Mapping[str, Any]:
        """What the attention layers of a pass take (see `DraftKVStore.attention`); nothing where no KV is kept."""
        return {} if self._kv is None else self._kv.attention(slots, starts, cu_queries)

    def _preceding(self, step: StepView) -> tuple[Tensor, ...]:
        """The hidden states [B, L*H] before each request's kept tokens, if rows that are not shifted read any.

        The step's last ones are kept by row for the next step. So what is captured keeps no state.
        """
        kept = step.kept
        if self.INPUTS_ARE_SHIFTED or not kept.hidden:
            return ()
        last = kept.hidden_cat(kept.last)
        if self._last_hidden is None:
            self._last_hidden = last.new_zeros(self.target.max_num_seqs, last.shape[1])
            self._last_generation = step.generation.new_full((self.target.max_num_seqs,), -1)
        is_new = self._last_generation[step.slots] != step.generation  # perhaps behind a cached prefix
        preceding = self._last_hidden[step.slots].masked_fill(is_new[:, None], 0)
        self._last_hidden[step.slots], self._last_generation[step.slots] = last, step.generation
        return (preceding,)

    def _last_hidden_of(self, slots: Tensor) -> tuple[Tensor, ...]:
        """The hidden states [b, L*H] of the last rows that were kept, if rows that are not shifted read any."""
        return () if self._last_hidden is None else (self._last_hidden[slots],)

    def _first_each(
        self, slots: Tensor, starts: Tensor, num_kept: Tensor, newest: Tensor, token_ids: Tensor, *hidden: Tensor
    ) -> Tensor:
        """The states after the kept entries, the first `num_kept` [b] of token_ids [b, W] and hidden [b, W, L*H].

        Rows that are not shifted take the hidden states [b, L*H] before them too. What the entries behind the kept ones
        write is overwritten before it is read, like the rows of rejected drafts.
        """
        if not self.INPUTS_ARE_SHIFTED:  # one input more: the newest token, right behind the kept ones
            places = torch.arange(token_ids.shape[1] + 1, device=slots.device)
            widened = torch.cat([token_ids, newest[:, None]], dim=1)
            token_ids = torch.where(places == num_kept[:, None], newest[:, None], widened)
            if hidden:
                kept, preceding = hidden
                hidden = (torch.cat([preceding[:, None], kept], dim=1),)
        count, width = token_ids.shape
        cu_queries = torch.arange(count + 1, device=slots.device) * width
        offsets = torch.arange(width, device=slots.device)
        positions = (starts[:, None] + offsets).clamp(max=self.target.max_model_len - 1).flatten()
        last = cu_queries[:-1] + num_kept - (1 if self.INPUTS_ARE_SHIFTED else 0)
        attention = self._attention(slots, starts, cu_queries)
        states = hidden[0].flatten(0, 1) if hidden else None
        return self.first(DraftInputs(token_ids.flatten().clamp(min=0), positions, states, last, attention))

    def _shifted(self, step: StepView) -> tuple[Any, ...]:
        """The arguments of `_first_shifted`."""
        kept = step.kept
        attention = self._attention(step.slots, kept.kept_start, kept.token_offsets)
        hidden = kept.hidden_cat() if kept.hidden else None
        return kept.next_token_ids, kept.positions, hidden, kept.token_offsets, kept.num_kept, attention

    def _first_shifted(
        self,
        next_token_ids: Tensor,  # [N]
        positions: Tensor,  # [N]
        hidden: Tensor | None,  # [N, L*H]
        token_offsets: Tensor,  # [B+1]
        num_kept: Tensor,  # [B]
        attention: Mapping[str, Any],
    ) -> Tensor:
        """The states after kept entries of which row i is (the token after i, the hidden states at i)."""
        last = token_offsets[:-1] + num_kept - 1
        return self.first(DraftInputs(next_token_ids.clamp(min=0), positions, hidden, last, attention))

    def _tokens(self, step: StepView) -> tuple[Any, ...]:
        """The arguments of `_first_tokens`."""
        kept = step.kept
        cu_queries = kept.token_offsets + torch.arange(len(step) + 1, device=kept.token_offsets.device)
        attention = self._attention(step.slots, kept.kept_start, cu_queries)
        places = kept.kept_start, kept.token_offsets, kept.num_kept, cu_queries, attention
        hidden = (kept.hidden_cat(), *self._preceding(step)) if kept.hidden else ()
        return kept.token_ids, step.newest_token, *places, *hidden

    def _first_tokens(
        self,
        token_ids: Tensor,  # [N]
        newest: Tensor,  # [B]
        starts: Tensor,  # [B]
        token_offsets: Tensor,  # [B+1]
        num_kept: Tensor,  # [B]
        cu_queries: Tensor,  # [B+1]
        attention: Mapping[str, Any],
        *hidden: Tensor,  # [N, L*H] and, before each request's kept tokens, [B, L*H]; or nothing
    ) -> Tensor:
        """The states after kept entries of which row i is the token at i, with the hidden states before it.

        One input more per request, its newest token, right behind its kept tokens.
        """
        total = token_ids.shape[0] + newest.shape[0]
        places = torch.arange(total, device=token_ids.device)
        owner = torch.searchsorted(cu_queries[1:], places, right=True)
        offset = places - cu_queries[owner]
        source = token_offsets[owner] + offset
        given = token_ids[source.clamp(max=token_ids.shape[0] - 1)]
        tokens = torch.where(offset == num_kept[owner], newest[owner], given)
        states = None
        if hidden:
            kept, preceding = hidden
            states = torch.where((offset == 0)[:, None], preceding[owner], kept[(source - 1).clamp(min=0)])
        last = cu_queries[:-1] + num_kept
        return self.first(DraftInputs(tokens, starts[owner] + offset, states, last, attention))


class HeadProposer(AutoregressiveProposer):
    """A head on the target's hidden states. After drafted tokens it reads states of its own in their place.

    `network` takes token ids, positions, states and arguments of the attention. Its `recycled` makes of an output what
    the next token reads, and its `logits` reads that too.
    """

    INPUTS_ARE_SHIFTED = True
    network: Any

    def first(self, inputs: DraftInputs) -> Tensor:
        """Run the committed rows on the target's hidden states."""
        assert inputs.hidden is not None, "declared"
        return self.run(inputs, inputs.hidden)

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Run one drafted token per request on the head's own state before it."""
        return self.run(inputs, states)

    def logits(self, states: Tensor) -> Tensor:
        """The head's logits of recycled states."""
        logits: Tensor = self.network.logits(states)
        return logits

    def run(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """The recycled states [b, h] at `inputs.last`, of rows that read states [M, h]."""
        output = self.network(inputs.token_ids, inputs.positions, states, inputs.attention)
        recycled: Tensor = self.network.recycled(output[inputs.last])
        return recycled
