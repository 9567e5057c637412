"""Calls of a proposer whose errors are attributed to it, counted, and raised or left behind as the policy says."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from specdec.sdk.calls import right_call
from specdec.sdk.errors import PluginId, ProposerError, Refusal, SpecdecError

from ..registry.attribution import FIELDS, author_frame, describe, is_complete, undeclared
from ..request.metrics import EngineMetrics

logger = logging.getLogger("specdec")

Answer = TypeVar("Answer")
OnProposerError = Literal["raise", "skip_step", "disable"]
MAX_ERRORS = 3
EFFECTS: dict[OnProposerError, str] = {
    "raise": "raised when the step is complete; requests keep what it committed",
    "skip_step": "going on without these drafts; outputs keep their distribution",
    "disable": f"going on without these drafts, after {MAX_ERRORS} errors without any; outputs keep their distribution",
}


class ContainedCalls:
    """`on_proposer_error`: "skip_step" goes on without this step's drafts; "disable" does the same and stops asking
    after three failures; "raise" raises a ProposerError, within `raising_last` at its end. What is generated has
    the same distribution in each case.
    """

    def __init__(
        self,
        plugin: PluginId,
        absent: Container[str],
        policy: OnProposerError,
        metrics: EngineMetrics,
        on_error: Callable[..., None],
    ) -> None:
        """absent: fields of a step that were not declared. on_error: told of each error that is left behind."""
        self.plugin = plugin
        self.enabled = True
        self._absent = absent
        self._policy = policy
        self._metrics = metrics
        self._on_error = on_error
        self._num_errors = 0  # an adapter forgives them
        self._num_of_kind: Counter[tuple[str, str]] = Counter()  # by code, and type of the exception
        self._held: list[ProposerError] | None = None  # to be raised; None: errors are raised where they happen

    @contextmanager
    def raising_last(self) -> Iterator[None]:
        """Treat errors inside as "skip_step" does. The first is raised at the end, with the others as its notes."""
        held = self._held = []
        try:
            yield
        finally:
            self._held = None
        if held:
            for other in held[1:]:
                held[0].add_note(str(other))
            raise held[0]

    def _contained(
        self, method: str, call: Callable[[], Answer], request_ids: Sequence[str] = (), *, failed: Answer
    ) -> Answer:
        """What the call returns; `failed` where it raises and the policy goes on."""
        try:
            return self._attempt(method, call)
        except SpecdecError as raised:
            error = raised
        self._handle(error if isinstance(error, ProposerError) else self._attributed(method, error), request_ids)
        return failed

    def _attempt(self, method: str, call: Callable[[], Answer]) -> Answer:
        """What the call returns. Raises SpecdecError alone: a proposer may not end the process, whatever it raises."""
        sys.audit("specdec.call", self.plugin, method)
        try:
            return call()
        except Refusal as refusal:
            raise refusal.attributed_on(self.plugin) from refusal
        except BaseException as error:  # an interrupt is the user's
            if isinstance(error, KeyboardInterrupt) or (isinstance(error, SpecdecError) and is_complete(error)):
                raise
            raise self._attributed(method, error) from error
        finally:
            sys.audit("specdec.call_ended")

    def _attributed(self, method: str, error: BaseException) -> ProposerError:
        facts = {"where": author_frame(error, self.plugin.target)}
        missing, call = undeclared(error, self._absent), right_call(error)
        if missing:
            facts["likely"] = f"a field of the step that is not declared is None: {', '.join(missing)}"
            facts["fix"] = f"needs = Needs({', '.join(dict.fromkeys(FIELDS[name] for name in missing))}, ...)"
        elif call:
            facts["fix"] = call
        code = "SD-E222" if missing else "SD-E210"
        raised = ProposerError(code, f"{method} raised {describe(error)}", facts, plugin=self.plugin)
        raised.__cause__ = error
        return raised

    def _handle(self, error: ProposerError, request_ids: Sequence[str]) -> None:
        error = self._placed(error, request_ids)
        self._metrics.proposer_errors[error.code] += 1
        if self._policy == "raise":
            if self._held is None:
                raise error
            self._held.append(error)
            return
        self._num_errors += 1
        kind = error.code, type(error.__cause__).__name__
        self._num_of_kind[kind] += 1
        if self._policy == "disable" and self._num_errors >= MAX_ERRORS:
            self.enabled = False
            logger.warning("%s\n  disabled after %d errors; decoding goes on without drafts", error, MAX_ERRORS)
        elif str(self._num_of_kind[kind]).strip("0") == "1":  # 1, 10, 100, ...
            logger.warning("%s\n  errors of this kind so far: %d", error, self._num_of_kind[kind])
        self._on_error(error=error)

    def _placed(self, error: ProposerError, request_ids: Sequence[str]) -> ProposerError:
        """The same error with the step, its requests, and what the policy makes of it."""
        names = ", ".join(map(repr, request_ids[:4])) + (f" and {len(request_ids) - 4} more" if request_ids[4:] else "")
        noun = "request" if len(request_ids) == 1 else "requests"
        number = max(self._metrics.counts["num_steps"], 1)  # other engines count none
        facts = {"step": f"{number}, {noun} {names}"} if names else {}
        facts["effect"] = f'on_proposer_error="{self._policy}": {EFFECTS[self._policy]}'
        placed = ProposerError(error.code, error.summary, error.facts | facts, plugin=error.plugin or self.plugin)
        placed.__cause__ = error.__cause__
        return placed
