"""The contract: what a proposer is, and what it may implement beyond that.

The smallest proposer is a class with a constructor and one method:

    class RepeatLast:
        def __init__(self, config: ProposerConfig, /) -> None:
            self.k = config.num_draft_tokens

        def propose(self, step: StepView, /) -> Draft:
            return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)

No base class is needed. `ProposerBase` has every optional method as one that does nothing, and so lets type checkers
see the author's own. A class may add these attributes. The engine looks each up once at load:

* `needs`: a `Needs` value, or a classmethod `needs(config, target) -> Needs` that may raise `Refusal`.
* `default_draft_tokens`: K if the configuration has no `num_speculative_tokens`. It is an integer, or a classmethod
  `default_draft_tokens(model) -> int | None` that may open the checkpoint `model`. Without it, K is the most that the
  proposer can draft.
* `Options`: a nested `StrictModel` (or other pydantic model) for `proposer_config`.
* `RequestOptions`: a nested `StrictModel`, each field with a default, for `SamplingParams.extra_args["specdec"]`. An
  instance is `RequestView.options`.
* `api_version`: the version of the contract that it was written for, as "major.minor". Without it, it is the lowest of
  the engine's major. A method that came later is then the class's own helper, and is not called.
* any other method of `ProposerBase`, and those of the extensions that `Needs.extensions` asks for.

What the engine and the class owe each other beside the signatures:

* Places: `Options`, `RequestOptions` and `TargetInfo.config` are JSON, and the class can be imported by its path.
  `needs` is a pure function. It is called in several processes, and any number of times before `__init__`.
* Threads: calls come one at a time. Services are used within a call only, on its thread. A thread of the class's own
  works on copies.
* Ranks: every rank makes the same calls in the same order. No branch may depend on what can differ between ranks, such
  as a clock, a process id, or a float of its own device.
* Streams: when a call returns, all device work is ordered on the stream that was current when it began. Who uses
  another stream makes the current one wait for it. What is enqueued after the return reuses the memory of the view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from .config import ProposerConfig
    from .needs import Needs
    from .services import Services
    from .types import Draft, RequestView, StepView, TargetInfo

API_VERSION = (1, 0)
"""The version of this contract, apart from the package's. A minor adds, and a major may break."""


class Proposer(Protocol):
    """A class that offers drafts. It is called after a step's tokens were committed, if any request wants drafts.

    It is also called for dummy steps (`StepView.dummy`), and a step may have no requests.
    """

    def __init__(self, config: ProposerConfig, /) -> None: ...

    def propose(self, step: StepView, /) -> Draft:
        """Drafts for the requests of the step, at most `step.budget[b]` for request b, in the step's order.

        `on_proposer_error` decides about an exception or an unusable draft. Neither changes the generated text.
        """
        ...


class ProposerBase(ABC):
    """A base class whose optional methods do nothing. The engine does not call one that a class only inherits.

    A request is started once and finished once. Each preemption lies between the two. Arguments come by position, so a
    class may name them as it likes.
    """

    # Not set here: what a class may state of itself
    api_version: ClassVar[str]
    needs: Needs | Callable[..., Needs]
    default_draft_tokens: int | Callable[..., int | None] | None

    def __init__(self, config: ProposerConfig[Any], /) -> None:
        self.config = config

    @abstractmethod
    def propose(self, step: StepView, /) -> Draft:
        """Draft for the requests that have a budget, as `Proposer.propose` says."""

    def bind(self, target: TargetInfo, services: Services, /) -> None:
        """Called after the target's weights are loaded and before the first request. Load draft weights here."""

    def warmup(self) -> None:
        """Compile, capture and allocate. Called after `bind`, never while requests run.

        The draft KV serves every slot meanwhile: what a pass writes there belongs to no request.
        """

    def on_start(self, request: RequestView, /) -> None:
        """A request got a slot for the first time."""

    def observe(self, step: StepView, /) -> None:
        """Called in every step before `propose`, also where no draft is wanted.

        If it raises, the step's requests get no drafts until they are computed again or finished. Learn state that
        requests share in the order of request ids, never of rows, and before any draft of the step is made from it.

        It is called in `torch.inference_mode`. To train, clone what the step lends and compute, both within
        `with torch.inference_mode(False), torch.enable_grad():`.
        """

    def on_preempt(self, request: RequestView, /) -> None:
        """The request lost its slot and KV. It comes back with a new generation, and is computed again.

        Drop state that lies in its slot or is counted by position, because its tokens are shown again.
        """

    def on_finish(self, request: RequestView, /) -> None:
        """The request ended or was aborted: drop its state. Called exactly once per `on_start`.

        It comes when the end is known, never before the last step that shows the request. That step may be one too
        many: it showed tokens that are not in `request.end.output_token_ids`. Ends that become known together are told
        in the order of ids.
        """

    def close(self) -> None:
        """The engine shuts down, or its start fails after `bind`. Called once."""


LIFECYCLE_METHODS = ("bind", "warmup", "on_start", "observe", "on_preempt", "on_finish", "close")

ADDED_METHODS: dict[str, tuple[int, int]] = {}
"""The version that a lifecycle method came with. Classes that state an older one, or none, are not asked for it."""
