"""The engine's side of one running proposer: every call of it, counted, timed and contained."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.errors import ConfigError, PluginId, ProposerError, SpecdecError
from specdec.sdk.hooks import StepStats
from specdec.sdk.saved_state import find_state, has_state, require_state, save_state
from specdec.sdk.services import Services
from specdec.sdk.types import RequestView, StepView, TargetInfo

from ..registry.load import LoadedProposer, construct
from ..request.metrics import EngineMetrics
from .contained_calls import ContainedCalls, OnProposerError
from .draft_check import DraftChecker
from .draft_table import CheckedDraft, DraftReport
from .pace import Pace
from .target_access import EarlyPasses
from .view_guard import Snapshot, is_due
from .views import ViewBuilder

logger = logging.getLogger("specdec")

NAME = re.compile(r"[a-z][a-z0-9_]*")
"""Of a figure that a proposer publishes."""


class ProposerHost(ContainedCalls):
    """Calls a proposer and lets none of its failures reach the requests."""

    def __init__(
        self,
        loaded: LoadedProposer,
        info: TargetInfo,
        device: torch.device,
        policy: OnProposerError,
        metrics: EngineMetrics,
        on_error: Callable[..., None],
        views: ViewBuilder | None = None,
        *,
        read_late: bool = False,
    ) -> None:
        """Construct the proposer.

        `device`: the target's. `views`: what shows it a step. None means the fields that it declared.
        `read_late`: see `DraftChecker`.
        """
        self.proposer = proposer = construct(loaded)
        self.loaded = loaded
        self.needs = loaded.needs
        self.width = loaded.config.width
        self.views = views or ViewBuilder(loaded.needs, self.width, info, device)
        super().__init__(loaded.plugin, self.views.absent, policy, metrics, on_error)
        self.keeps_pace = True  # False: the target is no real one, so nothing is said of what it costs
        self.saves_state = True  # False: it is measured, and `state_dir` stays as it is
        self._passes: EarlyPasses | None = None
        self.own_metrics: dict[str, float] = {}  # its own figures, as it told them last
        self.metrics_wanted = False  # set by a reader, on any thread
        self._methods: dict[str, Callable[..., object]] = {name: getattr(proposer, name) for name in loaded.methods}
        self._state_dir = loaded.state_dir
        max_depth = loaded.config.num_draft_tokens
        self._checker = DraftChecker(
            loaded.plugin, loaded.needs, info.vocab_size, device, read_late=read_late, max_depth=max_depth
        )
        self._num_steps = 0
        self.draft_seconds = 0.0  # of the step that runs
        self._pace = Pace(loaded.plugin)
        self._started: set[str] = set()
        self._stale: set[str] = set()  # requests whose steps the proposer has not all seen

    def wants_drafts_for(self, request_id: str) -> bool:
        """Whether a draft for this request can be asked for."""
        return self.enabled and request_id not in self._stale

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Bind it to the services: it loads its weights. A failure stops the start under any policy."""
        self.must("bind", target, services)

    def warm_up(self, passes: EarlyPasses | None = None) -> None:
        """Let it warm up where its draft KV is, and load its state. A failure stops the start under any policy.

        It is closed then. passes: over layers of the target, on a device. None means that there are none.
        """
        self._passes = passes
        with self.closed_on_failure():
            self.must("warmup")
            if self._state_dir is not None and has_state(self._state_dir):
                self.load(self._state_dir)

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close it where the start fails. Nothing is saved: state that could not be loaded would be written over."""
        try:
            yield
        except BaseException as error:
            try:
                self._end()
            except ProposerError as another:
                error.add_note(str(another))
            raise

    def start(self, request: RequestView) -> None:
        """Tell it of a request's first row."""
        self._started.add(request.request_id)
        self._tell_of_row("on_start", request)

    def preempt(self, request: RequestView) -> None:
        """Tell it that a request lost its row; computing it again makes a stale request whole."""
        self._tell_of_row("on_preempt", request)

    def _tell_of_row(self, method: str, request: RequestView) -> None:
        """Where that fails the request is stale, also if the failure is raised here."""
        self._stale.add(request.request_id)
        if self._notify(method, request, request_ids=(request.request_id,)):
            self._stale.discard(request.request_id)

    def finish(self, request: RequestView) -> None:
        """Tell it that a request ended, if it was told that it started."""
        self._stale.discard(request.request_id)
        if request.request_id in self._started:
            self._started.remove(request.request_id)
            self._notify("on_finish", request, request_ids=(request.request_id,))

    def draft(self, step: StepView, budgets: Sequence[int]) -> CheckedDraft | None:
        """Show it the step, then ask for drafts if any are wanted. None: no drafts from this step.

        `budgets` are those that the view shows: the view itself may have been written to.
        """
        if not self.enabled:
            return None
        self._num_steps += 1
        shared = Snapshot(step) if is_due(self._num_steps) else None
        start = time.perf_counter()
        if self._passes is not None:
            self._passes.begin(step)
        checked = self._asked(step, budgets)
        if self._passes is not None:
            self._passes.end()
        self.draft_seconds = time.perf_counter() - start
        if shared is not None:
            unchanged = partial(self._require_unchanged, shared, checked)
            return self._contained("propose", unchanged, step.request_ids, failed=None)
        return checked

    def keep_pace(self, stats: StepStats, seconds: float) -> None:
        """Count the time of a whole step. One warning names a proposer that costs more than it saves."""
        if self.enabled and self.keeps_pace:
            self._pace.record(stats, seconds, self.draft_seconds)
        self.draft_seconds = 0.0

    def check_late(self, request_ids: Sequence[str], budgets: Sequence[int], reports: Sequence[DraftReport]) -> None:
        """Check drafts of an earlier step, one for each request, that were read with the outcome."""
        if self.enabled:
            check = partial(self._checker.check_reports, request_ids, budgets, reports)
            self._contained("propose", check, request_ids, failed=None)

    def _asked(self, step: StepView, budgets: Sequence[int]) -> CheckedDraft | None:
        if not self._observes(step) or not (step.dummy or any(budgets)):
            return None
        self._metrics.counts["proposer_propose_calls"] += 1
        return self._contained("propose", partial(self._proposed, step, budgets), step.request_ids, failed=None)

    def _proposed(self, step: StepView, budgets: Sequence[int]) -> CheckedDraft:
        if self._passes is not None:
            self._passes.require_none()
        return self._checker.check(self.proposer.propose(step), step, budgets)

    def _require_unchanged(self, shared: Snapshot, checked: CheckedDraft | None) -> CheckedDraft | None:
        changes = shared.changes()
        if changes:
            facts = {
                "changed": "\n".join(changes[:3]) + (f"\nand {len(changes) - 3} more" if changes[3:] else ""),
                "why": "the parts of a combinator, and other engines' own code, read the same memory",
                "fix": "clone what you change; a method whose name ends in an underscore works in place",
            }
            summary = "the proposer wrote to the step, which it only borrows"
            raise ProposerError("SD-E220", summary, facts, plugin=self.plugin)
        return checked

    def _observes(self, step: StepView) -> bool:
        """Show it the step; where that fails the step's requests are stale, also if the failure stops the engine."""
        seen = False
        try:
            seen = self._notify("observe", step, request_ids=step.request_ids)
        finally:
            if not seen:
                self._stale.update(step.request_ids)
        return seen

    def close(self) -> None:
        """Save its state where that was asked for, and tell it that the engine shuts down, also if it is disabled."""
        self.metrics_wanted = True
        self.ask_metrics()
        try:
            if self._state_dir is not None and self.saves_state:
                self.save(self._state_dir)
        finally:
            self._end()

    def _end(self) -> None:
        if close := self._methods.pop("close", None):
            self._contained("close", close, failed=None)

    def save(self, path: Path) -> None:
        """Have it write its shared state. Raises ConfigError SD-E179, SD-E181; ProposerError whatever the policy."""
        require_state(self.plugin, self._methods)
        save_state(path, self.plugin, partial(self.must, "save"))

    def load(self, path: Path) -> None:
        """Have it read what `save` wrote. Raises as `save` does."""
        require_state(self.plugin, self._methods)
        self.must("load", find_state(path, self.plugin))

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Have it take new weights. Raises ConfigError SD-E227, SD-E228; ProposerError whatever the policy."""
        if "update_weights" not in self._methods:
            facts = {
                "expected": "NewWeights() among the extensions of its needs, with update_weights(tensors)",
                "fix": "a proposer with a network, or ask for NewWeights() and implement its method",
            }
            raise ConfigError("SD-E227", "this proposer takes no new weights", facts, plugin=self.plugin)
        self.must("update_weights", as_tensors(tensors))

    def ask_metrics(self) -> None:
        """Ask between steps for the proposer's own figures, if they are wanted. A failure is counted and
        never raised.
        """
        wanted, self.metrics_wanted = self.metrics_wanted, False
        if wanted and "metrics" in self._methods:
            try:
                self.own_metrics = self.told_metrics()
            except SpecdecError as error:
                self.own_metrics = {}
                self._metrics.proposer_errors[error.code] += 1
                logger.warning("%s", error)

    def told_metrics(self) -> dict[str, float]:
        """The proposer's own figures now. Raises ProposerError."""
        return self._attempt("metrics", partial(own_metrics, self._methods["metrics"], self.plugin))

    def must(self, method: str, *args: object) -> Any:
        """What an optional method returns, None where it is not there. Fails if it fails."""
        return self._attempt(method, partial(self._methods[method], *args)) if method in self._methods else None

    def _notify(self, method: str, *args: object, request_ids: Sequence[str]) -> bool:
        """Call an optional method if it is there. Returns whether the proposer is still in step."""
        if not self.enabled or method not in self._methods:
            return True
        failed = object()
        call = partial(self._methods[method], *args)
        return self._contained(method, call, request_ids, failed=failed) is not failed


def as_tensors(tensors: object) -> Mapping[str, Tensor]:
    """Weights as they are. Raises ConfigError SD-E228 for what is no mapping of names to tensors."""
    if isinstance(tensors, Mapping):
        wrong = [f"{name!r}: {type(each).__name__}" for name, each in tensors.items() if not _is_weight(name, each)]
    else:
        wrong = [type(tensors).__name__]
    if wrong:
        facts = {"expected": "a mapping of names to tensors", "found": ", ".join(wrong[:6])}
        raise ConfigError("SD-E228", "these are no weights; nothing was changed", facts)
    return tensors  # type: ignore[return-value]


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


def own_metrics(publish: Callable[[], object], plugin: PluginId) -> dict[str, float]:
    """Read what a plugin publishes. Names begin with `proposer_`. Raises ProposerError SD-E230 for no metric."""
    published = publish()
    if not isinstance(published, Mapping):
        raise _unusable(f"a {type(published).__name__}", plugin)
    for name, value in published.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _unusable(f"the name {name!r:.80}", plugin)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise _unusable(f"{name}: {value!r:.80}", plugin)
    prefix = prefix_of(plugin)
    return {prefix + name: float(value) for name, value in published.items()}


def prefix_of(plugin: PluginId) -> str:
    """The prefix of a proposer's figures: its name, or for a class path the class's."""
    return f"proposer_{re.sub(r'[^a-z0-9]+', '_', re.split(r'[.:]', plugin.name)[-1].lower()).strip('_')}_"


def _unusable(found: str, plugin: PluginId) -> ProposerError:
    facts = {
        "expected": "a mapping of names (lower-case letters, digits and underscores) to finite numbers",
        "found": found,
        "effect": "metrics are shown without this proposer's own",
    }
    return ProposerError("SD-E230", "the proposer published metrics that cannot be shown", facts, plugin=plugin)
