"""Runs one proposer on SGLang's requests: what each step did to them, what is drafted next, and when they end."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.core.host import (
    BlockPool,
    Committed,
    Computed,
    DistributionBuffers,
    DraftStore,
    EngineMetrics,
    EngineServices,
    FinishReason,
    Request,
    RequestProgress,
    RowTable,
    Scheduled,
    Speculation,
    SpeculativeConfig,
    profile_of,
    registry,
)
from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import Ahead, DraftKV, TargetTokens
from specdec.sdk.types import TargetInfo

from ..best_path import PathHost, PathViews
from ..request_options import read_running, sampled_alike
from ..serving.no_target import NoTarget
from ..withheld import withheld

_REST = "specdec.LLM, or a proposer that reads tokens alone"


@dataclass(eq=False)
class _Text:
    """A request of SGLang's, and ours for it."""

    theirs: weakref.ref[Any]
    request: Request
    draft: list[int] = field(default_factory=list)  # being verified


class Drafting:
    """A request has a row while SGLang decodes it.

    One that SGLang takes back (a retraction) is told as preempted, where a step runs without it.
    """

    def __init__(self, config: SpeculativeConfig, info: TargetInfo, tokenizer: Any) -> None:
        """Find, check, make and bind the proposer. Raises ConfigError, PluginLoadError, Refusal, ProposerError."""
        settings = registry.PluginSettings.from_environment(os.environ)
        hooks = registry.load_hooks(settings)
        missing = withheld("SGLang", "SGLang's cache is its own", torch.device(info.device))
        for each in (TargetTokens, DraftKV, Ahead):
            missing[each.id] = f"{each.__name__} was not tried inside SGLang", _REST
        speculation = Speculation.prepare(config, info, settings, hooks, withheld=missing)
        assert speculation is not None, "a config was given"
        info, loaded = speculation.info, speculation.loaded
        _refuse_needs(loaded)
        target = NoTarget(info)
        views = PathViews(loaded.needs, loaded.config.width, info, target.device)
        self.metrics = EngineMetrics(info.model, loaded.plugin.label)
        services = EngineServices(info, loaded.needs, target, tokenizer, profile_of(target.device).backend)
        self._host = speculation.host(services, self.metrics, hooks.observers, target.device, views, kind=PathHost)
        self._host.warm_up()
        self._info, self._loaded = info, loaded
        self._rows = RowTable(info.max_num_seqs, BlockPool(0, info.block_size, 0))
        drafts = DraftStore(DistributionBuffers.none())
        self._progress = RequestProgress(drafts, self._host, self.metrics, self._release)
        self._texts: dict[str, _Text] = {}

    def propose(self, reqs: Sequence[Any]) -> list[list[int]]:
        """Commit what the last pass gave each request that SGLang decodes, then draft for it: in their order."""
        self._leave(reqs)
        texts = [self._text(req) for req in reqs]
        self._progress.start([text.request for text in texts])
        committed = [self._commit(text) for text in texts]
        going_on = [each for each in committed if each is not None and each.request.finish_reason is None]
        nothing = torch.zeros(0, dtype=torch.int64)  # a host proposer is shown what was committed
        checked = self._progress.propose(going_on, self._loaded.config.width, Computed(nothing, nothing))
        chains = checked.token_ids if checked else [[] for _ in going_on]
        drafts = dict(zip([each.request.request_id for each in going_on], chains, strict=True))
        for text in texts:
            text.draft = drafts.get(text.request.request_id, [])
        return [text.draft for text in texts]

    def finish(self, request_id: str) -> None:
        """SGLang ended a request. One that it never decoded is not known here."""
        text = self._texts.get(request_id)
        if text is None:
            return
        req = text.theirs()
        if req is not None and text.request.row >= 0:
            self._commit(text)
        if text.request.finish_reason is None:
            ended = req.finished_reason if req is not None else None
            text.request.finish_reason = FinishReason(ended.to_json()["type"]) if ended else FinishReason.ABORT
        del self._texts[request_id]
        self._progress.finish([text.request])

    def report(self) -> dict[str, Any]:
        """The proposer, whether it is asked, calls, errors by code, its own figures, acceptance as the core counts."""
        self._host.metrics_wanted = True
        self._host.ask_metrics()
        return {
            "proposer": self.metrics.proposer,
            "enabled": self._host.enabled,
            "propose_calls": self.metrics.counts["proposer_propose_calls"],
            "errors": dict(self.metrics.proposer_errors),
            "figures": self._host.own_metrics,
            **self.metrics.acceptance.as_dict(),
        }

    def _leave(self, reqs: Sequence[Any]) -> None:
        """Requests that SGLang decodes no longer were taken back; those that it forgot meanwhile were aborted."""
        here = {req.rid for req in reqs}
        away = [text for request_id, text in self._texts.items() if request_id not in here]
        for text in [each for each in away if each.theirs() is None]:
            self.finish(text.request.request_id)
        lost = [text.request for text in away if text.request.row >= 0]
        for request in lost:
            self._release(request)
            request.num_computed_tokens = 0
        self._progress.preempt(lost)

    def _release(self, request: Request) -> None:
        if request.row >= 0:
            self._rows.unseat(request)

    def _text(self, req: Any) -> _Text:
        text = self._texts.get(req.rid)
        if text is not None and text.theirs() is not req:  # another one of this name came in place of it
            self.finish(req.rid)
            text = None
        if text is None:
            text = self._texts[req.rid] = _Text(weakref.ref(req), as_request(req, self._loaded, self._info))
        if text.request.row < 0:
            self._rows.seat(text.request)
            text.draft = []
        return text

    def _commit(self, text: _Text) -> Committed | None:
        """What the last pass did to a request. None: it ended before, as far as is known here."""
        request, req = text.request, text.theirs()
        if request.finish_reason is not None or req is None:
            return None
        outputs = list(req.output_ids[request.num_output_tokens :])
        share = Scheduled(request, request.num_computed_tokens, request.num_uncomputed_tokens, len(text.draft), True)
        return self._progress.commit(share, text.draft, outputs)


def _refuse_needs(loaded: registry.LoadedProposer) -> None:
    needs = loaded.needs
    if needs.hidden_states or needs.whole_prompt or needs.placement == "device":
        reason = "it reads the target's hidden states, whole prompts or rows on a device"
        raise Refusal(f"{reason}, which was not tried inside SGLang", _REST, plugin=loaded.plugin)


def as_request(req: Any, loaded: registry.LoadedProposer, info: TargetInfo) -> Request:
    """SGLang's request as the core's. It gets no drafts if its `custom_params` are not what the proposer takes."""
    theirs, prompt = req.sampling_params, list(req.origin_input_ids_unpadded)
    ends = set(theirs.stop_token_ids or ())
    ends |= set() if theirs.ignore_eos else set(req.eos_token_ids or ())
    most = info.max_model_len if theirs.max_new_tokens is None else theirs.max_new_tokens
    options, limits = read_running(loaded, theirs.custom_params, req.rid)
    greedy = theirs.top_k == 1  # SGLang writes a temperature of 0 so
    params = sampled_alike(
        req.rid,
        loaded.plugin,
        temperature=0.0 if greedy else theirs.temperature,
        top_k=0 if greedy or theirs.top_k >= info.vocab_size else theirs.top_k,
        top_p=theirs.top_p,
        min_p=theirs.min_p,
        max_tokens=most,
        min_tokens=min(theirs.min_new_tokens, most),
        speculative=limits.speculative and req.multimodal_inputs is None,
        num_speculative_tokens=limits.num_speculative_tokens,
    )
    return Request(
        request_id=req.rid,
        prompt_token_ids=prompt,
        params=params,
        seed=int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=7).digest()),
        max_total_tokens=min(len(prompt) + most, info.max_model_len),
        end_token_ids=frozenset(ends),
        detokenizer=None,
        options=options,
    )
