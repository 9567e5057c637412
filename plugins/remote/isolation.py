"""`"isolation": "process"` beside any method: its proposer drafts in a process that lives as long as the engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from specdec.sdk import (
    ConfigError,
    Draft,
    Needs,
    ProposerConfig,
    ProposerError,
    Refusal,
    Services,
    StepView,
    TargetInfo,
    hookimpl,
)
from specdec.sdk.elsewhere import refuse_what_reads_the_target
from specdec.sdk.extensions import Extension, Metrics, NewWeights, State
from specdec.sdk.extras import INSTALL_REMOTE, missing_of_remote
from specdec.sdk.hooks import CheckedProposer
from specdec.sdk.needs import needs_of
from specdec.sdk.proposer_protocol import Proposer

from .as_json import as_json
from .lasting import KeepsState, TakesWeights
from .proposer import AsksElsewhere, IsolationOptions

if TYPE_CHECKING:
    from .child import Child

PROCESS = "process"
LASTING: Mapping[Extension, type[Proposer]] = MappingProxyType({State(): KeepsState, NewWeights(): TakesWeights})
"""The methods of extensions that a process is asked for what it shares with nobody."""
FIGURES = "process_"
"""What the names of figures about the process begin with; others are the proposer's own."""


@hookimpl
def isolate_proposer(isolation: str | Mapping[str, Any], proposer: CheckedProposer) -> type[Proposer] | None:
    """The proposer in a process of its own.

    Raises ConfigError (SD-E330: the extra is not installed; SD-E131, SD-E132: its options), or Refusal for what only
    the engine's process can run.
    """
    values: Mapping[str, Any] = {"kind": isolation} if isinstance(isolation, str) else isolation
    if values.get("kind") != PROCESS:
        return None
    options = IsolationOptions.parse(values, "isolation")
    missing = missing_of_remote()
    if missing:
        raise ConfigError("SD-E330", f"{missing} is not installed", {"fix": INSTALL_REMOTE}, plugin=proposer.plugin)
    _refuse(proposer, options)
    needs = proposer.needs
    lasting = {each: cls for each, cls in LASTING.items() if needs.extension(type(each))}
    declared = Needs(
        history=True,
        hidden_states=needs.hidden_states,
        whole_prompt=needs.whole_prompt or bool(needs.hidden_states),
        state="shared" if needs.state == "shared" else "per_request",
        deterministic=needs.deterministic and options.deadline_ms is None,
        min_draft_tokens=needs.min_draft_tokens,
        max_draft_tokens=needs.max_draft_tokens,
        extensions=(Metrics(), *lasting),
        **_drawn(proposer),
    )
    held = {"needs": declared, "_inner": proposer, "_isolation": options, "_asked": _asked(proposer)}
    doc = f"{proposer.cls.__name__} in a process of its own."
    return type("Isolated", (IsolatedProposer, *lasting.values()), {**held, "__doc__": doc, "__module__": __name__})


def _drawn(proposer: CheckedProposer) -> dict[str, Any]:
    """What drawn drafts add to its needs: as in one process."""
    if proposer.config.draft_sample_method == "greedy":
        return {}
    names = ("distributions", "sparse_top_m", "draft_vocabulary", "sampling")
    return {name: getattr(proposer.needs, name) for name in names}


def _refuse(proposer: CheckedProposer, options: IsolationOptions) -> None:
    from .drawn import refuse_deadline

    refuse_what_reads_the_target(proposer.needs, proposer.plugin, shares_memory=True)
    module = proposer.plugin.target.partition(":")[0]
    if module == "__main__":
        reason = f"another process cannot import {proposer.plugin.target}, which stands in the script that runs"
        raise Refusal(reason, "the class in a module of its own", plugin=proposer.plugin)
    refuse_deadline(proposer.config, options.deadline_ms, proposer.plugin)


def _asked(proposer: CheckedProposer) -> dict[str, Any]:
    """The proposer's `speculative_config` there, in JSON. Raises Refusal for options that are none."""
    config, options = proposer.config, proposer.config.options
    try:
        written = as_json(options) if isinstance(options, BaseModel) else {}
    except ValueError as error:
        raise Refusal(
            f"its options are no JSON: {error}", "options of texts and numbers", plugin=proposer.plugin
        ) from error
    asked = {
        "method": proposer.plugin.target,
        "model": config.model,
        "num_speculative_tokens": config.num_draft_tokens,
        "max_nodes": config.max_nodes,
        "draft_sample_method": config.draft_sample_method,
        "proposer_config": written,
    }
    return asked | dict(config.network)


def place_of(tokenizer: Any) -> tuple[str, bool] | None:
    """Where it is loaded from again, and whether its class lies there: then the engine's user has trusted that code."""
    if tokenizer is None:
        return None
    return tokenizer.name_or_path, type(tokenizer).__module__.startswith("transformers_modules.")


class IsolatedProposer(AsksElsewhere):
    """A proposer in a process of its own, started and ended by its engine."""

    _inner: ClassVar[CheckedProposer]
    _isolation: ClassVar[IsolationOptions]
    _asked: ClassVar[dict[str, Any]]  # the `speculative_config` there

    def __init__(self, config: ProposerConfig[Any]) -> None:
        super().__init__(config.replace(options=self._isolation))

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Start the process. Raises what the proposer raises there, or ProposerError SD-E335."""
        from specdec.sdk.shared_states import SharedStates

        from .child import Child
        from .conversation import Conversation

        num_states = len(self._inner.needs.hidden_states)
        states = SharedStates(target, num_states) if num_states else None
        tokenizer = place_of(services.tokenizer)
        self._child: Child = Child(self._inner.plugin, target, self._asked, self._isolation, tokenizer, states)
        self._child.begin()
        needs = needs_of(type(self), self.config, target)
        self._conversation = Conversation(self._child, self.config, target, needs, self._inner.plugin, states)

    def propose(self, step: StepView[Any]) -> Draft:
        """Its answer, as far as it came. Raises the ProposerError of its process, which names a limit that it met."""
        try:
            return super().propose(step)
        except ProposerError as error:
            error.facts |= self._child.limit_met(str(error))
            raise

    def metrics(self) -> Mapping[str, float]:
        """The proposer's own, and behind `process_` what `RemoteProposer.metrics` shows, with `process_restarts`."""
        own = self._conversation.figures_there()
        shown = {**super().metrics(), "restarts": float(self._child.num_starts - 1)}
        return own | {FIGURES + name: value for name, value in shown.items()}
