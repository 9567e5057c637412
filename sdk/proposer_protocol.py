"""The contract: what a proposer is, and everything it may implement beyond that.

The smallest proposer is a class with a constructor and one method:

    class RepeatLast:
        def __init__(self, config: ProposerConfig) -> None:
            self.k = config.num_draft_tokens

        def propose(self, step: StepView) -> Draft:
            return Draft(step.newest_token[:, None].expand(-1, step.num_draft_tokens), step.budget)

No base class is needed. A class may add, each looked up once at load:

* `needs`: a `Needs` value, or a classmethod `needs(config, target) -> Needs` that may raise `Refusal`
* `default_draft_tokens`: K where the configuration leaves `num_speculative_tokens` out: an integer, or a classmethod
  `default_draft_tokens(model) -> int | None` that may open the checkpoint `model`; without it, the most it can draft
* `Options`: a nested `StrictModel` (or other pydantic model) for `proposer_config`
* `api_version`: the contract it was written for, as "major.minor"
* any method of `Lifecycle`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .config import ProposerConfig
    from .services import Services
    from .types import Draft, RequestView, StepView, TargetInfo

API_VERSION = (0, 1)
"""Version of this contract, apart from the package's: a minor adds, a major may break. 0.x is experimental."""


class Proposer(Protocol):
    """Anything that offers drafts. Called after a step's tokens were committed, if any request may be drafted for."""

    def __init__(self, config: ProposerConfig) -> None: ...

    def propose(self, step: StepView) -> Draft:
        """Drafts for the requests of the step, at most `step.budget[b]` for request b, in the step's order.

        An exception or an unusable draft is handled as `on_proposer_error` says; it never changes what is generated.
        """
        ...


class Lifecycle(Protocol):
    """Optional methods. A request is started once and finished once; each preemption lies between the two."""

    def bind(self, target: TargetInfo, services: Services) -> None:
        """After the target's weights are loaded, before the first request. Draft weights are loaded here."""
        ...

    def warmup(self) -> None:
        """After `bind`: compile, capture, allocate. Never called while requests run.

        The draft KV serves every row meanwhile: what a pass writes there is nobody's.
        """
        ...

    def on_start(self, request: RequestView) -> None:
        """A request was given a row for the first time."""
        ...

    def observe(self, step: StepView) -> None:
        """Every step, before `propose`, also where no draft is wanted: a draft KV never gets holes.

        If it raises, the step's requests get no drafts until they are replayed or finished. State that requests share
        is learned in the order of request ids, never of rows, and before any draft of the step is made from it.
        """
        ...

    def on_preempt(self, request: RequestView) -> None:
        """The request lost its row and KV. It comes back with a new generation, replayed from position 0.

        Drop what lies in its row, and what is counted by position: the replay shows every token again.
        """
        ...

    def on_finish(self, request: RequestView) -> None:
        """The request ended or was aborted: drop its state. Exactly once per `on_start`.

        Requests that end in one step are told of in the order of their ids.
        """
        ...

    def save(self, path: Path) -> None:
        """Write shared state (a corpus, statistics) below `path`."""
        ...

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        ...

    def close(self) -> None:
        """The engine shuts down. Called once."""
        ...


LIFECYCLE_METHODS = (
    "bind", "warmup", "on_start", "observe", "on_preempt", "on_finish", "save", "load", "close",
)  # fmt: skip
