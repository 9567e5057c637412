"""A host proposer whose drafts come from another process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self, get_args

from pydantic import Field, model_validator

from specdec.sdk import (
    ConfigError,
    Draft,
    Needs,
    ProposerBase,
    ProposerConfig,
    Refusal,
    RequestView,
    Services,
    StepView,
    StrictModel,
    TargetInfo,
)
from specdec.sdk.addresses import require_private
from specdec.sdk.extensions import MOST_OUTCOMES, Metrics, NewWeights
from specdec.sdk.extras import INSTALL_REMOTE, missing_of_remote
from specdec.sdk.keys import read_client_key
from specdec.sdk.needs import SamplingField

if TYPE_CHECKING:
    from torch import Tensor

    from .conversation import Conversation


class WaitingOptions(StrictModel):
    """How long an engine waits for a drafter in another process."""

    deadline_ms: float | None = Field(
        default=None, gt=0, description="the most that a step waits for drafts. None means until they come"
    )
    hang_seconds: float = Field(
        default=30.0, gt=0, description="a drafter that owes an answer for longer is taken for lost"
    )
    start_seconds: float = Field(
        default=60.0, gt=0, le=1e6, description="the longest wait for its first answer, at the start"
    )


class RemoteOptions(WaitingOptions):
    """Options of the remote proposer."""

    address: str = Field(description="where `specdec serve-proposer` listens: ipc:///PATH or tcp://HOST:PORT")
    key: str | None = Field(default=None, description="the file FILE.client that --new-key FILE wrote. None means none")
    draft_distribution: Literal["sparse", "dense"] = Field(
        default="sparse", description="what the server's probabilistic drafts report, as its own option says"
    )
    sparse_top_m: int = Field(default=256, ge=1, description="the most tokens that a sparse draft distribution has")

    @model_validator(mode="after")
    def _is_private(self) -> Self:
        require_private(self.address, has_key=self.key is not None)
        return self


class IsolationOptions(WaitingOptions):
    """The keys of `"isolation": {"kind": "process"}`."""

    kind: Literal["process"]
    start_seconds: float = Field(default=300.0, gt=0, le=1e6, description="the longest that it may take to start")
    memory_mib: int | None = Field(
        default=None, ge=1, description="the most memory that it may take beyond its libraries. None means no limit"
    )
    ahead: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_OUTCOMES)] = Field(
        default="auto",
        description="outcomes of a request's drafts that the next drafts are prepared for while the target verifies "
        "them. auto: as many as pay, on a CPU; 0: none",
    )
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads. None means PyTorch's own number")
    torch_compile: bool = Field(default=False, description="compile draft networks there at the start")


class AsksElsewhere(ProposerBase):
    """A proposer whose drafts come from a conversation with another process."""

    _conversation: Conversation  # from `bind` on

    def on_start(self, request: RequestView[Any]) -> None:
        """The drafter gets the prompt."""
        self._conversation.start(request)

    def observe(self, step: StepView[Any]) -> None:
        """It is asked for drafts behind what was committed."""
        self._conversation.observe(step)

    def propose(self, step: StepView[Any]) -> Draft:
        """Its answer, as far as it came. Raises the ProposerError of its process."""
        return self._conversation.propose(step)

    def on_finish(self, request: RequestView[Any]) -> None:
        """It forgets the request."""
        self._conversation.finish(request)

    def metrics(self) -> Mapping[str, float]:
        """What became of the questions.

        asked: questions. in_time: answered in the step that asked. late: answered in a later one. rebased: rests of
        answers that continued the text. dropped: rests that contradicted it. no_slot: requests that the drafter had no
        room for. errors: raised there. outages, returns: of the drafter. up: whether it can be asked. waited_ms: that
        steps waited. drafter_ms: that it worked.
        """
        return self._conversation.metrics()

    def close(self) -> None:
        """Leave the drafter."""
        if "_conversation" in vars(self):
            self._conversation.close()


class RemoteProposer(AsksElsewhere):
    """Drafts of the proposer that `specdec serve-proposer` runs at an address.

    Tokens go there and drafts come back. A drafter that is lost costs drafts, and the text is the same. It is reached
    again after pauses that grow, and then gets each text anew.
    """

    Options = RemoteOptions

    @classmethod
    def needs(cls, config: ProposerConfig[Any], target: TargetInfo) -> Needs:
        """The tokens. What the drafter learns, it may learn from other engines too.

        Raises Refusal if the libraries of the extra `remote` are not installed, or drawn drafts have a deadline.
        """
        missing = missing_of_remote()
        if missing:
            raise Refusal(f"{missing} is not installed", INSTALL_REMOTE)
        from .drawn import refuse_deadline

        options = config.options
        refuse_deadline(config, options.deadline_ms)
        drawn: dict[str, Any] = {}
        if config.draft_sample_method == "probabilistic":
            drawn = {"distributions": (options.draft_distribution,), "sampling": get_args(SamplingField)}
            if options.draft_distribution == "sparse":
                drawn["sparse_top_m"] = min(options.sparse_top_m, target.vocab_size)
        asked = tuple(each for each in (Metrics(), NewWeights()) if each.id in target.extensions)
        deterministic = options.deadline_ms is None
        return Needs(history=True, state="shared", deterministic=deterministic, extensions=asked, **drawn)

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Reach the drafter.

        Raises ConfigError SD-E334 if none answers there, SD-E332 if it refuses this engine, SD-E337 for its key.
        """
        from .conversation import Conversation
        from .drafter import At

        options = self.config.options
        key = None if options.key is None else read_client_key(Path(options.key))
        needs = self.needs(self.config, target)
        self._conversation = Conversation(At(options.address, key), self.config, target, needs)

    def update_weights(self, tensors: Mapping[str, Tensor]) -> NoReturn:
        """Raise ConfigError SD-E227: other engines draft with it too, and its server has the checkpoint."""
        facts = {
            "because": f"the drafter at {self.config.options.address} is not this engine's own",
            "fix": 'start its server again with the new checkpoint: engines find it. Or "isolation": "process" beside '
            "the draft network's own method",
        }
        raise ConfigError("SD-E227", "this proposer takes no new weights from an engine", facts)

    def metrics(self) -> Mapping[str, float]:
        """The conversation's figures, and behind `there_` what the proposer publishes, for all of its engines."""
        there = self._conversation.figures_there()
        return {**super().metrics(), **{f"there_{name}": value for name, value in there.items()}}
