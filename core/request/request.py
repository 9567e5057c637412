"""A request on its way through the engine: its tokens and text, its share of a step, and what the step did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch

from specdec.sdk.types import Phase, RequestEnd, RequestView

from ..config.sampling_params import SamplingParams
from ..kernels.philox import draft_key
from .grammar import RequestGrammar
from .metrics import RequestMetrics
from .verified_tree import VerifiedTree

_INCOMPLETE = "\ufffd"
_BYTE = re.compile(r"<0x..>")  # a token that is one byte; a wrong byte changes the text of the whole run of them


class Detokenizer:
    """Decodes token by token and looks for stop texts. In the end its text is the tokenizer's own of all tokens.

    `text` is what may be shown: it includes a stop text only where that is asked for, and, before the request ended, no
    beginning of one, nor what a later token may still change.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], skip_special_tokens: bool, *, include_stop: bool = False
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._decode = partial(self._backend.decode, skip_special_tokens=skip_special_tokens)
        self.stop, self._include_stop = tuple(stop), include_stop
        self._holdback = max((len(text) for text in stop), default=1) - 1
        self._settled = ""
        self._before: list[int] = []  # the last tokens that settled: the first token of a text is decoded otherwise
        self._lead = ""  # their text
        self._open: list[int] = []  # the tokens behind them
        self._waiting: list[int] = []  # those behind these: nobody has asked for their text
        self._num_searched = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens, where there are no stop texts."""
        self._waiting += token_ids

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Take in one more token. Returns the stop text that the output now contains, if it may stop yet."""
        self._waiting.append(token_id)
        if not self.stop:
            return None
        self._settle()
        return self._found(may_stop)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for token_id in waiting:
            self._open.append(token_id)
            text = self._decode(self._open)
            if text and not text.endswith(_INCOMPLETE) and self._settles(token_id):
                self._settled += self._rest()
                self._before, self._lead, self._open = self._open, text, []
            elif not self._decode([token_id]) and self._backend.decode([token_id], skip_special_tokens=False):
                self._open.pop()  # a special token that is in no text: a run of them would stay open

    def _settles(self, token_id: int) -> bool:
        """Whether the text up to this token stays: it is no byte, and it is shown at all."""
        is_shown = len(self._open) == 1 or bool(self._decode([token_id]))
        return is_shown and not _BYTE.fullmatch(self._backend.id_to_token(token_id))

    def _rest(self) -> str:
        """The text of the other tokens, if the request ended here."""
        text: str = self._decode(self._before + self._open + self._waiting)
        return text[len(self._lead) :]

    def _found(self, may_stop: bool) -> str | None:
        decoded = (self._settled + self._rest()).rstrip(_INCOMPLETE)
        searched, self._num_searched = self._num_searched, len(decoded)
        places = [(at, text) for text in self.stop if (at := decoded.find(text, max(searched - len(text) + 1, 0))) >= 0]
        if not places or not may_stop:
            return None
        at, text = min(places)
        end = at + len(text) if self._include_stop else at
        self._settled, self._lead, self._before, self._open = decoded[:end], "", [], []
        return text

    def text(self, finished: bool) -> str:
        """The output so far; while the request runs, without an end that may change or may begin a stop text."""
        if finished:
            return self._settled + self._rest()
        self._settle()
        return self._settled[: max(len(self._settled) - self._holdback, 0)]


class FinishReason(Enum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"  # end of sequence, a stop token or a stop text
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"
    ERROR = "error"  # its grammar refuses the token that was sampled, allows none, or failed


@dataclass(eq=False)
class Request:
    """State of one request. Only the engine and its scheduler write to it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output, after max_model_len
    end_token_ids: frozenset[int]  # tokens that end it (end of sequence unless ignored, stop tokens)
    detokenizer: Detokenizer | None
    prompt: str | None = None
    grammar: RequestGrammar | None = None  # None: the output is free
    options: Any = None  # what the proposer's RequestOptions made of params.extra_args
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    row: int = -1
    generation: int = 0
    started: bool = False
    num_computed_tokens: int = 0  # tokens with KV in the cache
    num_cached_tokens: int | None = None  # that it did not compute when it began; None: nobody looked for any
    blocks: list[int] = field(default_factory=list)
    num_known_blocks: int = 0  # of these, those that others can find
    shares_blocks: bool = True  # False: they are forgotten, or the draft KV of some of them may have gaps
    logprobs: list[dict[int, float]] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    output_counts: Counter[int] = field(default_factory=Counter)  # kept for penalised requests only
    token_ids: list[int] = field(init=False)
    _shown: tuple[object, RequestView] | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @classmethod
    def stand_in(cls, length: int, row: int, generation: int, blocks: list[int]) -> Self:
        """What stands in a row for a pass that computes no request of a user's, of so many tokens."""
        return cls(
            "", [], SamplingParams(), 0, length, frozenset(), None, row=row, generation=generation, blocks=blocks
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens without KV: 1 while decoding, more before the prompt is in the cache."""
        return len(self.token_ids) - self.num_computed_tokens

    @cached_property
    def penalised(self) -> bool:
        """Whether earlier tokens change its logits."""
        params = self.params
        return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)

    @cached_property
    def _looks_at_each(self) -> bool:
        """Whether a token that does not end it changes more than its tokens."""
        has_stop_texts = self.detokenizer is not None and bool(self.detokenizer.stop)
        return has_stop_texts or self.penalised or self.grammar is not None

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether its logits are changed before sampling at all."""
        return self.penalised or bool(self.params.logit_bias) or self.params.min_tokens > 0

    @cached_property
    def reads_logits(self) -> bool:
        """Whether more becomes of its logits than a token."""
        return self.adjusts_logits or self.grammar is not None or self.params.logprobs is not None

    @cached_property
    def most_drafts(self) -> int:
        """How many drafts it may get in a step, as far as its parameters say."""
        limit = self.params.num_speculative_tokens if self.params.speculative else 0
        return self.max_total_tokens if limit is None else limit

    @property
    def may_be_drafted(self) -> bool:
        """Whether drafts may be verified: not while its ends are barred, to which a finished grammar does not yield."""
        return self.grammar is None or self.num_output_tokens >= self.params.min_tokens

    @cached_property
    def prompt_counts(self) -> Counter[int]:
        """How often each token stands in the prompt."""
        return Counter(self.prompt_token_ids)

    @cached_property
    def draft_key(self) -> int:
        """Key of its draft stream, which does not hand out the request's seed.

        It is 63 bits of a function of the seed and keeps no secret: who tries all small seeds finds the seed, and with
        it the verifier's uniforms.
        """
        return int(draft_key(torch.tensor(self.seed)))

    @property
    def view(self) -> RequestView:
        """What steps, lifecycle methods and hooks show of it."""
        now = (self.row, self.generation, self.finish_reason)
        if self._shown is None or self._shown[0] != now:
            self._shown = now, self._view()
        return self._shown[1]

    def _view(self) -> RequestView:
        end = None
        if self.finish_reason is not None:
            end = RequestEnd(
                reason=self.finish_reason.value,
                output_token_ids=self.output_token_ids,
                num_drafted=self.metrics.num_draft_tokens,
                num_accepted=self.metrics.num_accepted_tokens,
            )
        return RequestView(
            request_id=self.request_id,
            slot=self.row,
            generation=self.generation,
            prompt_token_ids=tuple(self.prompt_token_ids),  # a copy: a proposer may grow what it was given
            options=self.options,
            namespace=self.params.namespace,
            end=end,
        )

    def begin_behind(self, num_tokens: int) -> None:
        """The KV of its first tokens is there already. After a preemption it may begin elsewhere."""
        self.num_computed_tokens, self.shares_blocks = num_tokens, True
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens

    def commit(self, token_ids: Sequence[int]) -> int:
        """Append sampled tokens until one ends the request. Returns how many were committed."""
        room = self.max_total_tokens - len(self.token_ids)
        if not self._looks_at_each and len(token_ids) < room and self.end_token_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            if self.detokenizer is not None:
                self.detokenizer.extend(token_ids)
            return len(token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            refused = self.grammar is not None and not self.grammar.accept(token_id)
            if refused and self._is_stuck():  # an accepted draft led here, and this was sampled behind it
                return count - 1
            self.token_ids.append(token_id)
            if self.penalised:
                self.output_counts[token_id] += 1
            if self._ends_with(token_id, refused=refused):
                return count
        self._is_stuck()
        return len(token_ids)

    def _is_stuck(self) -> bool:
        """Whether the grammar lets no token follow, which ends the request."""
        if self.grammar is None or not self.grammar.is_stuck:
            return False
        self._finish(FinishReason.STOP if self.grammar.may_end else FinishReason.ERROR, None)
        return True

    def _ends_with(self, token_id: int, *, refused: bool) -> bool:
        may_stop = len(self.token_ids) - len(self.prompt_token_ids) > self.params.min_tokens
        may_stop = may_stop or (self.grammar is not None and self.grammar.has_ended)
        ended_by_token = may_stop and token_id in self.end_token_ids
        stop_text = None
        if self.detokenizer is not None and not ended_by_token:
            stop_text = self.detokenizer.append(token_id, may_stop)
        elif self.detokenizer is not None and self.params.include_stop_str_in_output:
            self.detokenizer.extend([token_id])
        if ended_by_token or stop_text is not None:
            asked_for = token_id in self.params.stop_token_ids
            self._finish(FinishReason.STOP, token_id if ended_by_token and asked_for else stop_text)
        elif refused:
            self._finish(FinishReason.ERROR, None)
        elif len(self.token_ids) >= self.max_total_tokens:
            self._finish(FinishReason.LENGTH, None)
        return self.finish_reason is not None

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def abort(self) -> None:
        """End the request where it stands."""
        self._finish(FinishReason.ABORT, None)


class Scheduled(NamedTuple):
    """A request's share of a pass: `num_tokens` committed tokens to compute, then its drafts."""

    request: Request
    start: int  # position of its first token in this pass
    num_tokens: int
    num_draft_tokens: int  # of those that are stored for it
    samples: bool  # whether its newest token is computed, so that the next one is sampled
    first_token: int = 0  # where its tokens begin in the batch

    @property
    def num_rows(self) -> int:
        """Tokens that it computes: committed ones and drafts."""
        return self.num_tokens + self.num_draft_tokens

    @property
    def first_draft(self) -> int:
        """Where its drafts begin in the batch."""
        return self.first_token + self.num_tokens

    @property
    def num_logits_rows(self) -> int:
        """Logits rows: one for the newest token and one for every draft. None in the middle of a prompt."""
        return self.num_draft_tokens + 1 if self.samples else 0


class Committed(NamedTuple):
    """What a step did to one request, as of the moment after commit: what the request does later does not change it."""

    request: Request
    row: int
    generation: int
    first_token: int  # where its tokens begin in the batch
    num_rows: int  # tokens computed, drafts included
    first_position: int  # of the first of them
    num_kept: int  # rows whose KV survived: everything computed up to, not including, the newest token
    draft_token_ids: list[int]  # verified; of a tree, the accepted path, what was met at its end, then all others
    num_accepted: int
    token_ids: list[int]  # committed; empty in the middle of a prompt
    length: int  # of prompt and output, the newest token included
    tree: VerifiedTree | None = None  # None: a chain

    @classmethod
    def now(
        cls,
        share: Scheduled,
        draft_token_ids: list[int],
        num_accepted: int,
        token_ids: list[int],
        tree: VerifiedTree | None = None,
    ) -> Committed:
        """The outcome for a request that has its tokens and stands where its KV ends."""
        request, start, num_tokens, num_drafts, _, first = share
        num_kept, length = request.num_computed_tokens - start, len(request.token_ids)
        held = request, request.row, request.generation, first, num_tokens + num_drafts, start, num_kept
        return cls(*held, draft_token_ids, num_accepted, token_ids, length, tree)

    @classmethod
    def nothing(cls, request: Request) -> Committed:
        """The outcome for a request that ended between steps."""
        return cls.now(Scheduled(request, request.num_computed_tokens, 0, 0, samples=False), [], 0, [])

    @property
    def accepted_nodes(self) -> Sequence[int]:
        """Their numbers in the order of the draw, from the root on."""
        return range(self.num_accepted) if self.tree is None else self.tree.nodes

    @property
    def num_drafted(self) -> int:
        return len(self.draft_token_ids)

    @property
    def newest_token(self) -> int:
        """The newest token. In the middle of a prompt, the next prompt token."""
        place = self.length - 1 if self.token_ids else self.first_position + self.num_kept
        return self.request.token_ids[place]

    @property
    def phase(self) -> Phase:
        if not self.token_ids:
            return Phase.PREFILL
        first = self.length - self.request.num_prompt_tokens == len(self.token_ids)
        return Phase.PREFILL_DONE if first else Phase.DECODE


COLUMNS = {
    "slots": attrgetter("row"),
    "generation": attrgetter("generation"),
    "phase": attrgetter("phase"),
    "committed_length": attrgetter("length"),
    "newest_token": attrgetter("newest_token"),
    "num_drafted": attrgetter("num_drafted"),
    "num_accepted": attrgetter("num_accepted"),
}
"""What a view holds one number of per request, by the view's names."""
