"""What an engine's steps say to a drafter elsewhere, and how long they wait for what it answers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec.sdk.config import ProposerConfig
from specdec.sdk.errors import PluginId, ProposerError, SpecdecError, message
from specdec.sdk.needs import Needs
from specdec.sdk.shared_states import SharedStates
from specdec.sdk.types import Draft, RequestView, StepView, TargetInfo, TokenHistory
from specdec.sdk.wire import (
    MOST_NAME,
    PROTOCOL,
    Ask,
    AskDrawn,
    AskStates,
    Call,
    Drafted,
    Drafts,
    End,
    Failed,
    Form,
    Hello,
    Method,
    Returned,
    as_error,
    as_text,
)

from .asking import Rows
from .drafter import Drafter, Place
from .drawn import DrawnFrom, distribution_of, drawings_of, most_answer_bytes
from .texts import Text, UnsendableError, end_of, name_of, start_of

logger = logging.getLogger("specdec")

FIGURES = ("asked", "in_time", "late", "rebased", "dropped", "no_slot", "errors", "outages", "returns")
FIGURES_SECONDS = 1.0
"""The longest wait for the proposer's own figures."""

MOST_UNREAD = 64
"""Messages that a drafter is read before it counts as one that hangs: it may never stop talking."""


@dataclass(eq=False)
class _Question:
    """An `Ask` that was not answered yet."""

    number: int
    texts: Mapping[str, Text]  # that it is about, by their names
    step: int
    begin: float  # seconds


class Conversation:
    """One question is in flight. A step takes what is there, asks for what is new, and waits until its deadline.

    One-hot drafts that come later are re-based on what was committed since: offered if they continue the text, else
    dropped. So is what is left of an answer. The text does not depend on when they come. Drawn drafts are waited for,
    and offered behind the text that they were drawn for or never (`drawn`).
    """

    def __init__(
        self,
        place: Place,
        config: ProposerConfig[Any],
        target: TargetInfo,
        needs: Needs,
        plugin: PluginId | None = None,
        states: SharedStates | None = None,
    ) -> None:
        """Reach the drafter. Raises ConfigError SD-E334 if none answers there, SD-E332 if it refuses this engine.

        needs: those that the engine knows. Drafts are drawn if they report a distribution.
        plugin: whose errors they are. None means that the drafter says so.
        states: where the drafter finds hidden states. None means that it reads none.
        """
        self._form = Form.of(needs, target.vocab_size)
        self._plugin, self._states = plugin, states
        self._options = config.options
        self.figures: Counter[str] = Counter()
        self._waited = 0.0  # seconds
        self._worked = 0.0  # seconds, of the drafter
        k, name = config.num_draft_tokens, as_text(target.model, MOST_NAME)
        hello = Hello(PROTOCOL, target.vocab_size, target.max_model_len, k, name, self._form)
        most_bytes = most_answer_bytes(self._form, target.max_num_seqs, k)
        self._drafter = Drafter(place, hello, self.figures, most_bytes=most_bytes)
        self._vocab_size = target.vocab_size
        self._texts: dict[str, Text] = {}  # by request id
        self._question: _Question | None = None
        self._number = self._step = self._num_losses = 0
        self._error: SpecdecError | None = None  # the newest that was not raised yet
        self._figures_there: dict[str, float] = {}  # as they were told last
        self._drafter.begin(self._options.start_seconds)

    def start(self, request: RequestView[Any]) -> None:
        """Its prompt goes to the drafter, which computes it beside the target."""
        self._texts[request.request_id] = text = Text(name_of(request.request_id))
        if self._is_up():
            self._send_start(text, request)

    def finish(self, request: RequestView[Any]) -> None:
        """The drafter forgets it too."""
        text = self._texts.pop(request.request_id, None)
        if text is not None and text.sent:
            self._drafter.send(end_of(request, text.name, text.sent))

    def observe(self, step: StepView[Any]) -> None:
        """Take the answer that is there, and ask."""
        self._step += 1
        if self._states is not None:
            self._see(step)
        if self._is_up():
            self._take(self._drafter.receive(0))
            self._ask(step)

    def propose(self, step: StepView[Any]) -> Draft:
        """Wait for the answer, and offer what continues the texts. Raises the drafter's ProposerError."""
        begin = time.monotonic()
        self._wait(step, begin + self._longest())
        self._waited += time.monotonic() - begin
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        history = step.history
        assert history is not None, "declared in needs"
        drafts: list[list[int]] = [[] for _ in step.request_ids]
        drawn_from: list[DrawnFrom | None] = [None] * len(step)
        lengths = zip(step.request_ids, step.committed_length.tolist(), step.budget.tolist(), strict=True)
        for place, (request_id, length, budget) in enumerate(lengths):
            text = self._texts.get(request_id)
            if text is not None and budget:
                since = history.token_ids(place, text.length) if text.rest and text.length < length else []
                drafts[place] = text.drafts(since, length, self.figures)[:budget]
                drawn_from[place] = text.drawn_from
        draft = Draft.from_lists(drafts, step.width)
        distribution = distribution_of(drawn_from, step.width, self._form)
        return draft if distribution is None else replace(draft, distribution=distribution)

    def metrics(self) -> Mapping[str, float]:
        """How many questions were asked, and what became of the answers; milliseconds that steps waited."""
        known = {name: float(self.figures[name]) for name in FIGURES}
        times = {"waited_ms": 1000 * self._waited, "drafter_ms": 1000 * self._worked}
        return known | times | {"up": float(self._drafter.is_up)}

    def figures_there(self) -> dict[str, float]:
        """The proposer's own; those that it told last, if it does not tell them soon. Raises its ProposerError."""
        returned = self._call("metrics", "", FIGURES_SECONDS)
        if returned is not None:
            self._figures_there = returned.figures
        return self._figures_there

    def call(self, method: Method, path: str, again: str) -> None:
        """Have it save its state, load it, or take weights. Raises its SpecdecError, or SD-E336 without an answer.

        again: what is changed. A drafter that comes back is told the newest call for each: to load what it saved.
        """
        if self._call(method, path, self._options.start_seconds) is None:
            facts = {"asked": f"{method} {path}", "effect": "it was not done", "fix": "again when the drafter is back"}
            raise ProposerError("SD-E336", "a drafter in another process did not answer", facts, plugin=self._plugin)
        self._drafter.first_words.pop(again, None)
        self._drafter.first_words[again] = Call(0, "load" if method == "save" else method, path)

    def _call(self, method: Method, path: str, seconds: float) -> Returned | None:
        """None: no answer came. Raises its SpecdecError."""
        self._number += 1
        number, end = self._number, time.monotonic() + seconds
        if not self._is_up() or not self._drafter.send(Call(number, method, path)):
            return None
        while (left := end - time.monotonic()) > 0 and self._drafter.is_up:
            answer = self._drafter.receive(left)
            if isinstance(answer, Returned) and answer.number == number:
                return answer
            if isinstance(answer, Failed) and answer.number == number:
                raise as_error(answer, self._plugin)
            self._take(answer)
        return None

    def close(self) -> None:
        """Leave the drafter."""
        self._drafter.close()

    def _is_up(self) -> bool:
        if self._hangs():
            self._drafter.lose(f"it has not answered for {self._options.hang_seconds:g} s")
        up = self._drafter.is_up
        if self._drafter.num_losses != self._num_losses:  # whoever noticed it
            self._num_losses = self._drafter.num_losses
            self._question = None  # it will be told everything again
            for text in self._texts.values():
                text.sent = 0
        if up:
            failed, self._drafter.failed = self._drafter.failed, None
            self._take(failed)
        return up

    def _hangs(self) -> bool:
        """Whether an answer is due for long, and does not lie there either: an engine at rest looks for none."""
        question = self._question
        if question is None or time.monotonic() - question.begin <= self._options.hang_seconds:
            return False
        for _ in range(MOST_UNREAD):
            answer = self._drafter.receive(0)
            self._take(answer)
            if answer is None or self._question is not question:
                break
        return self._question is question and self._drafter.num_losses == self._num_losses

    def _longest(self) -> float:
        """Seconds that this step may wait. A drafter that hangs counts from its question on."""
        deadline = self._options.deadline_ms
        longest: float = self._options.hang_seconds
        return longest if deadline is None else min(deadline / 1000, longest)

    def _wait(self, step: StepView[Any], end: float) -> None:
        while self._question is not None and self._is_up():
            was_for_this_step = self._question.step == self._step
            answer = self._drafter.receive(max(0.0, end - time.monotonic()))
            if answer is not None:
                self._take(answer)
                if not was_for_this_step:
                    self._ask(step)
            if time.monotonic() >= end:
                self._is_up()
                return

    def _see(self, step: StepView[Any]) -> None:
        """Keep the step's hidden states until they are handed over."""
        kept = step.kept
        parts = torch.split(kept.hidden_cat(), kept.num_kept.tolist())
        for request_id, first, states in zip(step.request_ids, kept.kept_start.tolist(), parts, strict=True):
            text = self._texts.get(request_id)
            if text is not None and text.see(first, states):
                self._drafter.send(End(text.name, "abort", 0, []))  # it may never be started there again

    def _ask(self, step: StepView[Any]) -> None:
        """For drafts behind all that is new, unless a question is in flight."""
        if self._question is not None or step.history is None:
            return
        asked = self._rows_of(step, step.history)
        if not asked.rows:
            return
        self._number += 1
        drawings = [] if self._form is None else drawings_of(step, self._drafter.num_uniforms)
        drawn = [drawings[place] for place in asked.places] if drawings else []
        ask = AskDrawn(self._number, asked.rows, drawn) if drawn else Ask(self._number, asked.rows)
        if self._states is not None:
            ask = AskStates(self._number, asked.rows, drawn, _hand_over(self._states, asked.texts.values()))
        if self._drafter.send(ask):
            self._question = _Question(self._number, asked.texts, self._step, time.monotonic())
            self.figures["asked"] += 1

    def _rows_of(self, step: StepView[Any], history: TokenHistory) -> Rows:
        """What is new of its requests, as far as a message holds it."""
        asked = Rows(0 if self._form is None else self._drafter.num_uniforms, whole=self._states is not None)
        columns = (step.committed_length, step.budget, step.num_drafted, step.num_accepted)
        rows = zip(step.requests, *(each.tolist() for each in columns), strict=True)
        for place, (request, length, *wanted) in enumerate(rows):
            text = self._texts.get(request.request_id)
            if text is None or not self._is_due(text, request):
                continue
            if text.sent < length and (self._states is None or text.num_states == length - 1):
                lacks = length - text.sent
                count = asked.room_for(text, lacks)
                if count:  # drafts come with the last of them
                    new = history.token_ids(place, text.sent)[:count]
                    asked.add(text, text.row(new, *(wanted if count == lacks else (0, 0, 0))), place)
        return asked

    def _is_due(self, text: Text, request: RequestView[Any]) -> bool:
        """Whether it is asked for now. It is started at the drafter first, where that has to be done again."""
        if text.pause:
            text.pause -= 1
            return False
        if not text.sent and not text.is_lost and not text.is_refused:
            self._send_start(text, request)
        return bool(text.sent)

    def _send_start(self, text: Text, request: RequestView[Any]) -> None:
        try:
            start = start_of(request, text.name)
        except UnsendableError as error:
            self._refuse(text, request.request_id, str(error))
        else:
            if self._drafter.send(start):
                text.sent = len(request.prompt_token_ids)

    def _refuse(self, text: Text, request_id: str, reason: str) -> None:
        text.is_refused, text.sent = True, 0
        facts = {"request": request_id, "because": reason, "effect": "it gets no drafts; other requests do"}
        logger.warning("%s", message("SD-W332", "a request is not for its drafter", facts, self._plugin))

    def _take(self, answer: Drafts | Failed | Returned | None) -> None:
        if answer is None or isinstance(answer, Returned):
            return
        if isinstance(answer, Failed):
            self._take_error(answer)
            return
        question = self._question
        if question is None or answer.number != question.number:
            self._drafter.lose(f"it answered question {answer.number}, which was not asked")
            return
        self._question = None
        self._worked += answer.micros / 1e6
        self.figures["in_time" if question.step == self._step else "late"] += 1
        try:
            for row in answer.rows:
                self._take_row(row, question.texts)
        except ValueError as error:
            self._drafter.lose(str(error))

    def _take_error(self, failed: Failed) -> None:
        error, question = as_error(failed, self._plugin), self._question
        self.figures["errors"] += 1
        if failed.request_id:
            for request_id, text in self._texts.items():
                if text.name == failed.request_id:
                    self._refuse(text, request_id, str(error))
            return
        self._error = error
        if question is not None and failed.number == question.number:
            self._question = None
            if self._states is None:  # they come once: it has kept the texts that go with them
                for text in question.texts.values():
                    text.sent = 0

    def _take_row(self, row: Drafted, texts: Mapping[str, Text]) -> None:
        """Take the draft of one of the texts that were asked for. Raises ValueError for none for this target."""
        if any(token >= self._vocab_size for token in row.tokens):
            raise ValueError(f"it drafted a token that is none of the target's {self._vocab_size}")
        text = texts.get(row.request_id)
        if text is not None:
            text.take(row, self.figures, self._form)


def _hand_over(memory: SharedStates, texts: Collection[Text]) -> list[int]:
    """Put there what the drafter lacks of these texts. Returns the hidden states of each."""
    parts = [text.hand_over() for text in texts]
    memory.write([states for each in parts for states in each])
    return [sum(map(len, each)) for each in parts]
