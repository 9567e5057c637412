"""pluggy hook specifications: registrations and observers. They run outside of the hot path, for many listeners.

A package offers an object with hooks under the entry-point group `specdec.plugins`. Proposing is not a hook. It has
exactly one callee and is a typed method call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from .errors import PluginId, ProposerError

if TYPE_CHECKING:
    from torch import Tensor

    from .config import ProposerConfig
    from .needs import Needs
    from .proposer_protocol import Proposer
    from .types import RequestView

PROJECT_NAME = "specdec"
hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Counts of one engine step."""

    step: int
    num_requests: int
    num_tokens_computed: int
    num_drafts: int  # requests that had drafts verified
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int


@dataclass(frozen=True, kw_only=True)
class VerifiedRequest:
    """What a step did to one request that sampled."""

    request_id: str
    first_row: int  # of `VerifiedStep.logits`: row i follows the committed tokens and the first i drafts, or node i - 1
    position: int  # of its first new token, counted from the beginning of the prompt
    draft_token_ids: Sequence[int]  # verified; of a tree, the accepted path, what was met at its end, then all others
    num_accepted: int
    token_ids: Sequence[int]  # committed: accepted drafts, then one token more; fewer where the request ended
    accepted_nodes: Sequence[int] | None = None  # of a tree, from the root on. None means that a chain was verified

    @property
    def logits_rows(self) -> list[int]:
        """The row of `VerifiedStep.logits` that gave each of `token_ids`."""
        places = range(len(self.token_ids))
        if self.accepted_nodes is not None:
            return [self.first_row + place for place in (0, *(node + 1 for node in self.accepted_nodes))][: len(places)]
        return [self.first_row + place for place in places]


@dataclass(frozen=True, kw_only=True)
class VerifiedStep:
    """The verification of one step. It is borrowed: the tensor is valid during the call and may not be written."""

    requests: tuple[VerifiedRequest, ...]
    logits: Tensor  # [R, V] as verified: after grammars, bias and penalties, before temperature and filters


@dataclass(frozen=True)
class CheckedProposer:
    """A proposer that was found and checked, and has not been constructed."""

    plugin: PluginId
    cls: type[Proposer]
    config: ProposerConfig
    needs: Needs
    methods: frozenset[str]  # those that are called: of the lifecycle, and of extensions that were asked for


class Registry(Protocol):
    """The registry that a `register_*` hook adds to."""

    def add(self, name: str, value: Any) -> None:
        """Offer `value` under `name`. Raises PluginLoadError if the name is taken."""
        ...


class HookSpecs:
    """Every hook. An implementation may leave out arguments. New versions only add arguments."""

    @hookspec
    def register_proposers(self, registry: Registry) -> None:
        """Offer proposers that have no entry point: name -> "module:Class"."""

    @hookspec
    def register_speculator_config(self, registry: Registry) -> None:
        """Say which checkpoints a proposer is for: proposer name -> callable(Checkpoint) -> bool."""

    @hookspec(firstresult=True)
    def resolve_proposer(self, spec: str) -> str | None:
        """A proposer's "module:Class" for a `method` that no registration knows. None means no answer."""

    @hookspec(firstresult=True)
    def adapt_proposer(self, candidate: Any) -> type[Proposer] | None:
        """A proposer class around `candidate`, a class for another engine. None means that it is not such a class."""

    @hookspec(firstresult=True)
    def isolate_proposer(self, isolation: str | Mapping[str, Any], proposer: CheckedProposer) -> type[Proposer] | None:
        """A proposer class that runs `proposer` apart from the engine, constructed with the same configuration.

        isolation: as `speculative_config` says it. None means that this plugin does not offer such an isolation.
        """

    @hookspec(firstresult=True)
    def explain_key(self, key: str, value: Any) -> str | None:
        """Why a key of `speculative_config` that nothing here declares is refused, and what to write instead.

        An empty text means that the value asks for what is so already. None means that this plugin does not know the
        key.
        """

    @hookspec
    def on_engine_start(self, engine: Any) -> None:
        """The engine is ready for requests."""

    @hookspec
    def on_request_start(self, request: RequestView) -> None:
        """A request was scheduled for the first time."""

    @hookspec
    def on_step(self, stats: StepStats) -> None:
        """A step was committed."""

    @hookspec
    def on_verified(self, step: VerifiedStep) -> None:
        """Drafts were verified and tokens committed; plain tokens are steps without drafts.

        The step is built only where somebody listens.
        """

    @hookspec
    def on_request_finished(self, request: RequestView, metrics: Mapping[str, Any]) -> None:
        """A request ended. `metrics` are its `spec_decode_metrics`."""

    @hookspec
    def on_proposer_error(self, error: ProposerError) -> None:
        """A proposer failed, and the setting `on_proposer_error` did not stop the engine."""

    @hookspec
    def on_engine_stop(self, summary: Mapping[str, Any]) -> None:
        """The engine is shutting down."""
