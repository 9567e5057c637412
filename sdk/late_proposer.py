"""A base for those who ask a service: answers may come late, and no step waits for longer than it is told."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread
from time import monotonic
from typing import Any

from pydantic import Field

from .config import ProposerConfig, StrictModel
from .extensions import Metrics
from .host_proposer import HostProposer, returned_ids
from .needs import Needs
from .token_ids import token_id
from .types import Draft, RequestView, StepView, TargetInfo

logger = logging.getLogger("specdec")

FIGURES = ("asked", "in_time", "late", "rebased", "dropped", "errors")
CLOSE_SECONDS = 1.0
"""How long `close` waits for questions that are being asked, all together."""


class LateOptions(StrictModel):
    """Options of every LateProposer."""

    deadline_ms: float | None = Field(
        default=0, ge=0, description="the most that a step waits for answers. None means until all are there"
    )
    num_threads: int = Field(default=8, ge=1, description="questions that are asked at once; others wait their turn")


class LateProposer(HostProposer):
    """A base class that needs only `ask`, which may take longer than a step.

    Each request has one question in flight. A step takes the answers that are there and goes on. A later answer is
    re-based on what was committed since: it is offered if it continues the text, and dropped if not. What is left of an
    answer serves later steps too. So the text is that of plain decoding, whenever answers come.

    An error of `ask` is raised once for each type, and counted from then on. A call that never returns costs its
    request's drafts and a thread, so give your client a timeout.
    """

    Options: type[LateOptions] = LateOptions

    @classmethod
    def needs(cls, config: ProposerConfig[Any], target: TargetInfo) -> Needs:
        """The tokens. Drafts depend on the text alone where every answer is awaited."""
        deterministic = config.options.deadline_ms is None
        return Needs(history=True, state="per_request", deterministic=deterministic, extensions=(Metrics(),))

    def __init__(self, config: ProposerConfig[Any]) -> None:
        super().__init__(config)
        self._threads = _Threads(config.options.num_threads, f"{type(self).__name__}.ask")
        self._figures: Counter[str] = Counter()
        self._texts: dict[str, _Text] = {}  # by request id
        self._delay = 0  # tokens that were committed during recent questions
        self._errors: list[BaseException] = []  # to be raised
        self._types_raised: set[type[BaseException]] = set()

    @abstractmethod
    def ask(self, request: RequestView[Any], tokens: Sequence[int], k: int, /) -> Sequence[int]:
        """Token ids that may follow. It runs on a thread of the base's, beside other calls of it.

        request: whose text it is; `request.options` are its RequestOptions.
        tokens: a copy of the prompt and the output so far.
        k: the most token ids that are of use. It covers what will be committed meanwhile.
        """

    def propose(self, step: StepView, /) -> Draft:
        """Take the answers that are there, ask anew, and offer what continues the texts. Raises an error of `ask`."""
        wanting = [(self._texts.setdefault(each[0].request_id, _Text()), *each) for each in self.wanting(step)]
        for text, request, tokens, k in wanting:
            self._take(text, tokens)
            self._ask(text, request, tokens, k)
        self._wait([text for text, *_ in wanting])
        for text, request, tokens, k in wanting:
            self._take(text, tokens)
            self._ask(text, request, tokens, k)
        if self._errors:
            raise self._errors.pop(0)
        return super().propose(step)

    def draft(self, request: RequestView[Any], tokens: Sequence[int], k: int, /) -> Sequence[int]:
        """What is left of the newest answer."""
        return self._texts[request.request_id].rest[:k]

    def on_finish(self, request: RequestView[Any], /) -> None:
        """Forget the request. The answer to its question is dropped."""
        super().on_finish(request)
        text = self._texts.pop(request.request_id, None)
        if text is not None and text.answer is not None:
            text.answer.drop()
            self._figures["dropped"] += 1

    def metrics(self) -> Mapping[str, float]:
        """How many questions were asked, and what became of the answers.

        in_time: came in the step that asked. late: came in a later one. rebased: were late and continued the text.
        dropped: contradicted the text, had nothing beyond it, or came after its end. waiting: are not there yet.
        """
        waiting = sum(text.answer is not None for text in self._texts.values())
        return {name: float(self._figures[name]) for name in FIGURES} | {"waiting": float(waiting)}

    def close(self) -> None:
        """End the threads. A question that is being asked gets a second to end."""
        self._threads.close()

    def _ask(self, text: _Text, request: RequestView[Any], tokens: Sequence[int], k: int) -> None:
        """Unless a question is in flight, or was answered for this very text."""
        if text.answer is None and text.asked_at != len(tokens):
            text.asked_at = len(tokens)
            text.answer = self._threads.run(partial(self._answer, request, list(tokens), k + self._delay))
            self._figures["asked"] += 1

    def _answer(self, request: RequestView[Any], tokens: list[int], k: int) -> list[int]:
        return [token_id(each) for each in returned_ids("ask", self.ask(request, tokens, k))]

    def _wait(self, texts: Sequence[_Text]) -> None:
        """Wait for texts that have nothing to offer. Without a deadline, wait for all: no draft depends on the time."""
        deadline = self.config.options.deadline_ms
        awaited = [text.answer for text in texts if text.answer is not None and (deadline is None or not text.rest)]
        if deadline != 0:
            wait(awaited, timeout=None if deadline is None else min(deadline / 1000, TIMEOUT_MAX))

    def _take(self, text: _Text, tokens: Sequence[int]) -> None:
        """The answer, if it is there: it takes the place of an older one where it continues the text."""
        text.rest, text.length = continued(text.rest, tokens, text.length), len(tokens)
        if text.answer is None or not text.answer.done():
            return
        answer, text.answer = text.answer, None
        if self.config.options.deadline_ms is None:
            text.rest = []  # drafts depend on the text alone: only the answer to this text counts
        error = answer.exception()
        if error is not None:
            self._figures["errors"] += 1
            if type(error) not in self._types_raised:
                self._types_raised.add(type(error))
                self._errors.append(error)
            return
        found, delay = answer.result(), len(tokens) - text.asked_at
        rest = continued(found, tokens, text.asked_at)
        self._delay = max(delay, self._delay - 1)
        self._figures["late" if delay else "in_time"] += 1
        self._figures["rebased"] += bool(delay and rest)
        self._figures["dropped"] += bool(found and not rest)
        text.rest = rest or text.rest


def continued(answer: list[int], tokens: Sequence[int], length: int) -> list[int]:
    """What an answer that was asked after `length` tokens says behind `tokens`. Nothing if it contradicts them."""
    since = tokens[length:] if answer else []
    return answer[len(since) :] if answer[: len(since)] == since else []


@dataclass(eq=False)
class _Text:
    """What is known of one request's continuation."""

    answer: _Answer | None = None  # in flight
    asked_at: int = 0  # tokens that the last question knew
    rest: list[int] = field(default_factory=list)  # of an answer, behind `length` tokens
    length: int = 0


class _Answer(Future[list[int]]):
    """What a call will return."""

    def __init__(self, call: Callable[[], list[int]]) -> None:
        super().__init__()
        self._call: Callable[[], list[int]] | None = call

    def run(self) -> None:
        """Call, unless nobody waits for the answer any more. What the call raises is raised where it is taken."""
        call = self._call
        if self.set_running_or_notify_cancel() and call is not None:
            try:
                self.set_result(call())
            except BaseException as error:
                self.set_exception(error)

    def drop(self) -> None:
        """Nobody waits for it. A call that has not begun is let go, with its request."""
        if self.cancel():
            self._call = None


class _Threads:
    """Threads that run calls in turn. They are daemons: a call that hangs keeps no process from its end."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._waiting: SimpleQueue[_Answer | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._end = weakref.finalize(self, _end, self._waiting, self._threads)

    def run(self, call: Callable[[], list[int]]) -> _Answer:
        """Have it run by the next thread that is free."""
        answer = _Answer(call)
        self._waiting.put(answer)
        if len(self._threads) < self._most:
            thread = Thread(target=_work, args=(self._waiting,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return answer

    def close(self) -> None:
        """End the threads, and wait for them a little."""
        self._end()
        end = monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(end - monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("%s still runs after %g s: give its client a timeout", self._name, CLOSE_SECONDS)


def _work(waiting: SimpleQueue[_Answer | None]) -> None:
    while (answer := waiting.get()) is not None:
        answer.run()
        del answer  # an idle thread keeps no proposer alive


def _end(waiting: SimpleQueue[_Answer | None], threads: Sequence[Thread]) -> None:
    """Calls that nobody has begun are left out."""
    with suppress(Empty):
        while (answer := waiting.get_nowait()) is not None:
            answer.drop()
            answer.set_running_or_notify_cancel()  # who waits for it is told
    for _ in threads:
        waiting.put(None)
