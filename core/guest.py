"""The engine's side of one running proposer: every call of it, counted, timed and contained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from specdec.sdk import (
    Proposer,
    ProposerError,
    RequestView,
    Services,
    SpecdecError,
    StepView,
    TargetInfo,
)

from .draft_check import CheckedDraft, DraftChecker
from .metrics import EngineMetrics
from .registry import LoadedProposer, author_frame
from .runner.views import ViewBuilder

logger = logging.getLogger("specdec")

OnProposerError = Literal["raise", "skip_step", "disable"]
MAX_ERRORS = 3


class Guest:
    """Calls a proposer and lets none of its failures reach the requests.

    `on_proposer_error`: "raise" stops the engine's step with a ProposerError; "skip_step" goes on without this step's
    drafts; "disable" does the same and stops asking after three failures. What is generated is the same in each case.
    """

    def __init__(
        self,
        proposer: Proposer,
        loaded: LoadedProposer,
        checker: DraftChecker,
        views: ViewBuilder,
        policy: OnProposerError,
        metrics: EngineMetrics,
        on_error: Callable[[ProposerError], None],
    ) -> None:
        self.proposer = proposer
        self.plugin = loaded.plugin
        self.needs = loaded.needs
        self.num_draft_tokens = loaded.config.num_draft_tokens
        self.views = views
        self.enabled = True
        self._methods: dict[str, Callable[..., object]] = {name: getattr(proposer, name) for name in loaded.methods}
        self._checker = checker
        self._policy = policy
        self._metrics = metrics
        self._on_error = on_error
        self._num_errors = 0
        self._started: set[str] = set()
        self._stale: set[str] = set()  # requests whose steps the proposer has not all seen

    def wants_drafts_for(self, request_id: str) -> bool:
        """Whether a draft for this request can be asked for."""
        return self.enabled and request_id not in self._stale

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Lend it the target's services and let it warm up. Failing here stops the start, whatever the policy."""
        self._must("bind", target, services)
        self._must("warmup")

    def start(self, request: RequestView) -> None:
        """Tell it of a request's first row."""
        self._started.add(request.request_id)
        if not self._notify("on_start", request):
            self._stale.add(request.request_id)

    def preempt(self, request: RequestView) -> None:
        """Tell it that a request lost its row; its replay makes a stale request whole again."""
        self._stale.discard(request.request_id)
        if not self._notify("on_preempt", request):
            self._stale.add(request.request_id)

    def finish(self, request: RequestView) -> None:
        """Tell it that a request ended, if it was told that it started."""
        self._stale.discard(request.request_id)
        if request.request_id in self._started:
            self._started.remove(request.request_id)
            self._notify("on_finish", request)

    def draft(self, step: StepView, budgets: Sequence[int]) -> CheckedDraft | None:
        """Show it the step, then ask for drafts if any are wanted. None: no drafts from this step.

        `budgets` are those that the view shows: the view itself may have been written to.
        """
        if not self.enabled or not self._observes(step) or not any(budgets):
            return None
        self._metrics.counts["proposer_propose_calls"] += 1
        checked: list[CheckedDraft] = []
        self._contained(
            "propose", lambda: checked.append(self._checker.check(self.proposer.propose(step), step, budgets))
        )
        return checked[0] if checked else None

    def _observes(self, step: StepView) -> bool:
        """Show it the step; where that fails the step's requests are stale, also if the failure stops the engine."""
        seen = False
        try:
            seen = self._notify("observe", step)
        finally:
            if not seen:
                self._stale.update(step.request_ids)
        return seen

    def close(self) -> None:
        """Tell it that the engine shuts down, also if it was disabled before."""
        if "close" in self._methods:
            self._contained("close", self._methods["close"])

    def save(self, path: Path) -> None:
        """Ask it to write its shared state. Raises ProposerError whatever the policy."""
        self._must("save", path)

    def load(self, path: Path) -> None:
        """Ask it to read its shared state. Raises ProposerError whatever the policy."""
        self._must("load", path)

    def _must(self, method: str, *args: object) -> None:
        """Call an optional method if it is there, and fail if it fails."""
        if method not in self._methods:
            return
        try:
            self._methods[method](*args)
        except SpecdecError:
            raise
        except Exception as error:
            raise self._blame(method, error) from error

    def _notify(self, method: str, *args: object) -> bool:
        """Call an optional method if it is there. Returns whether the proposer is still in step."""
        if not self.enabled or method not in self._methods:
            return True
        return self._contained(method, lambda: self._methods[method](*args))

    def _contained(self, method: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except ProposerError as error:
            self._handle(error)
        except Exception as error:
            effect = f"on_proposer_error={self._policy!r}; what is generated does not change"
            self._handle(self._blame(method, error, {"effect": effect}))
        else:
            return True
        return False

    def _blame(self, method: str, error: Exception, facts: Mapping[str, str] | None = None) -> ProposerError:
        where = {"where": author_frame(error, self.plugin.target)}
        summary = f"{method} raised {type(error).__name__}: {error}"
        raised = ProposerError("SD-E210", summary, {**where, **(facts or {})}, plugin=self.plugin)
        raised.__cause__ = error
        return raised

    def _handle(self, error: ProposerError) -> None:
        self._metrics.proposer_errors[error.code] += 1
        if self._policy == "raise":
            raise error
        self._num_errors += 1
        if self._policy == "disable" and self._num_errors >= MAX_ERRORS:
            self.enabled = False
            logger.warning("%s\n  disabled after %d errors; decoding goes on without drafts", error, MAX_ERRORS)
        elif self._num_errors == 1:
            logger.warning("%s", error)
        self._on_error(error)
