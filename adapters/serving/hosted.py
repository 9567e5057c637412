"""Runs one proposer on texts that come by message: what its engine would show it, without a target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specdec import SamplingParams
from specdec.core.host import (
    BlockPool,
    CheckedDraft,
    Committed,
    Computed,
    DistributionBuffers,
    DraftStore,
    EngineMetrics,
    EngineServices,
    FinishReason,
    Provided,
    Request,
    RequestProgress,
    RowTable,
    Scheduled,
    Speculation,
    SpeculativeSettings,
    compiler,
    prefix_of,
    profile_of,
    registry,
)
from specdec.sdk.child_wire import AheadSetting
from specdec.sdk.elsewhere import refuse_what_reads_the_target
from specdec.sdk.errors import RequestError, SpecdecError
from specdec.sdk.extensions import Ahead, DraftKV
from specdec.sdk.types import TargetInfo
from specdec.sdk.wire import DRAFTED, FULL, UNKNOWN, Distribution, Drafted, Drawing, DrawnDraft, End, Form, Row, Start

from ..best_path import PathHost, PathViews
from ..request_options import options_of
from .drawing import distributions_of, with_drawings
from .no_target import NoTarget
from .outcomes import NumOutcomes
from .shown_states import ShownStates

CHUNK = 512
"""The most tokens of a request that the proposer is shown in a step of a long prompt."""

_Answer = tuple[list[int], Distribution | None]
"""A draft, and what it was drawn from. None means that it is one-hot, or that nobody asked."""

_Share = tuple[Scheduled, list[int], list[int]]
"""A request's part of a step, the drafts that were verified, and the tokens committed."""

REASONS = {each.value for each in FinishReason}


@dataclass(eq=False)
class _Text:
    """A client's request."""

    request: Request
    draft: list[int] = field(default_factory=list)  # what was answered last


def served_speculation(
    asked: SpeculativeSettings,
    info: TargetInfo,
    settings: registry.PluginSettings,
    hooks: registry.HookPlugins,
    ahead: AheadSetting,
) -> Speculation:
    """The proposer that is to be served. Unless `ahead` is 0, it may prepare drafts between steps.

    On a GPU "auto" means 0: drafting passes are captured there, and those between steps are not.
    Raises as `Speculation.prepare` does.
    """
    if ahead != 0 and (ahead != "auto" or torch.device(info.device).type == "cpu"):
        info = replace(info, extensions=info.extensions | {Ahead.id})
    speculation = Speculation.prepare(asked, info, settings, hooks)
    assert speculation is not None, "a proposer is named"
    return speculation


class Hosted:
    """The proposer and the requests of every client, by names that begin with their client's and a slash.

    Requests keep their rows and draft KV while their engine preempts them: the texts stay the same.
    """

    def __init__(
        self,
        info: TargetInfo,
        speculation: Speculation,
        observers: registry.Observers,
        tokenizer: Any,
        ahead: AheadSetting = 0,
        states: int | None = None,
        *,
        torch_compile: bool = False,
    ) -> None:
        """Make it, bind it and warm it up. `info`: of the target that is drafted for, and the number of slots.

        states: the file descriptor of `SharedStates`. None means that none can be handed over. torch_compile: whether
        draft networks are compiled. On a GPU their passes are captured.

        Raises Refusal if it reads what cannot be handed over, and what its constructor, `bind` and `warmup` raise.
        """
        loaded = speculation.loaded
        refuse_what_reads_the_target(loaded.needs, loaded.plugin, shares_memory=states is not None)
        speculation = replace(speculation, config=speculation.config.replace(on_proposer_error="raise"))
        self.info, self.plugin = info, loaded.plugin
        self.num_draft_tokens = loaded.config.num_draft_tokens
        draws = loaded.config.draft_sample_method == "probabilistic"
        self.form = Form.of(loaded.needs, info.vocab_size) if draws else None  # of drawn drafts' distributions
        self.num_uniforms = loaded.config.width if draws else 0
        self._loaded, self._lookahead = loaded, speculation.lookahead
        self._keeps_kv = loaded.needs.extension(DraftKV) is not None
        num_states = len(loaded.needs.hidden_states)
        self._states = ShownStates(info, num_states, states) if num_states else None
        self._reads_batch = loaded.needs.placement == "device" or self._states is not None
        target, profile = NoTarget(info), profile_of(torch.device(info.device))
        per_row = -(-(info.max_model_len + self._lookahead) // info.block_size) if self._keeps_kv else 0
        self._rows = RowTable(info.max_num_seqs, BlockPool(info.max_num_seqs * per_row, info.block_size, per_row))
        self._views = PathViews(loaded.needs, self.num_draft_tokens, info, target.device)
        captured = profile.capture(None, False, info.max_num_seqs, 0)
        provided = Provided(
            capture=captured.function if captured else None,
            compiling=compiler().CompiledFunction if torch_compile and compiler() else None,
        )
        services = EngineServices(info, loaded.needs, target, tokenizer, profile.backend, provided=provided)
        metrics = EngineMetrics(info.model, self.plugin.label)
        self.host = speculation.host(services, metrics, observers, target.device, self._views, kind=PathHost)
        addressing = profile.addressing(self._rows, info, self._lookahead)
        self._table = addressing.table
        services.lay_out_draft_kv(self._rows.pool.num_blocks, addressing)
        self.host.warm_up()
        drafts = DraftStore(DistributionBuffers.none())
        self._progress = RequestProgress(drafts, self.host, metrics, self._rows.unseat)
        self._texts: dict[str, _Text] = {}
        self._outcomes = NumOutcomes(ahead if "draft_ahead" in loaded.methods else 0, time.perf_counter)
        self._num_outcomes = 0  # that drafts are still to be prepared for; 0: there is nothing to be done
        self._failed: SpecdecError | None = None  # between steps

    def start(self, name: str, start: Start) -> None:
        """Take a request in, and show its prompt up to the last token. Without a slot for it nothing happens.

        Raises RequestError for options that the proposer does not take, or a prompt that does not fit; ProposerError.
        """
        self.end(name)
        self._require_tokens(start.prompt, len(start.prompt), name)
        options = options_of(self._loaded, start.options, name)
        if not self._rows.num_free and not self._gets_slot(name):
            return
        request = Request(
            request_id=name,
            prompt_token_ids=start.prompt,
            params=SamplingParams(temperature=0, max_tokens=self.info.max_model_len, namespace=start.namespace),
            seed=0,
            max_total_tokens=self.info.max_model_len + 1,  # its engine says when it ends
            end_token_ids=frozenset(),
            detokenizer=None,
            options=options,
        )
        self._rows.seat(request)
        self._texts[name] = _Text(request)
        self._progress.start([request])
        if self._states is None:
            self._catch_up([request])

    def _gets_slot(self, name: str) -> bool:
        """Whether the client with the most requests gives its newest one up: to a client that has two fewer or less."""
        held = Counter(map(_client_of, self._texts))
        if not held:
            return False
        (most, number), *_ = held.most_common(1)
        if number < held[_client_of(name)] + 2:
            return False
        self.end(next(each for each in reversed(self._texts) if _client_of(each) == most))
        return True

    def step(
        self, rows: Sequence[tuple[str, Row]], drawings: Sequence[Drawing] = (), num_states: Sequence[int] = ()
    ) -> list[Drafted]:
        """Show what was committed, and draft. Raises ProposerError, RequestError for tokens that cannot be.

        After a ProposerError the requests of the step are unknown, and begin anew. Where hidden states are read, which
        come once, those stay whose tokens were shown.
        drawings: what each row is drawn with. Empty means that none is drawn. Nothing is prepared behind drawn drafts.
        num_states: hidden states of each row, where they are read.
        """
        known = [(self._texts[name], row) for name, row in rows if self._follows(name, row)]
        if self._states is not None:
            self._states.take(rows, num_states, {text.request.request_id: text.request for text, _ in known})
        drawn_with = dict(zip([name for name, _ in rows], drawings, strict=False))
        failed, self._failed = self._failed, None
        try:
            if failed is not None:
                raise failed
            drafts = self._drafted(known, drawn_with)
        except SpecdecError:
            for text, row in known:
                if self._states is None or len(text.request.token_ids) != row.start + len(row.tokens):
                    self.end(text.request.request_id)
                else:
                    text.draft = []
            raise
        for text, _ in known:
            text.draft, _ = drafts.get(text.request.request_id, ([], None))
        self._num_outcomes = self._outcomes.next([] if drawings else [name for name, (ids, _) in drafts.items() if ids])
        return [self._answer(name, row, drafts) for name, row in rows]

    @property
    def has_more_to_do(self) -> bool:
        """Whether `draft_ahead` prepares for the next step."""
        return self._num_outcomes > 0

    def draft_ahead(self) -> None:
        """One pass of it. What it raises is raised in the next step."""
        try:
            goes_on = self.host.must("draft_ahead", self._num_outcomes)
        except SpecdecError as error:
            self._failed, goes_on = error, False
        if not goes_on:
            self._num_outcomes = 0

    def end(self, name: str, end: End | None = None) -> None:
        """Forget a request. Raises ProposerError, RequestError for last tokens that cannot be.

        end: None means that it was aborted.
        """
        if name not in self._texts:
            return
        if end is not None:
            self._require_tokens(end.tokens, end.start + len(end.tokens), name)
        self._num_outcomes = 0
        request = self._texts.pop(name).request
        request.abort()
        if end is not None and end.start <= len(request.token_ids):
            request.token_ids[end.start :] = end.tokens
            if end.reason in REASONS:
                request.finish_reason = FinishReason(end.reason)
        self._progress.finish([request])

    def names(self, prefix: str) -> list[str]:
        """Sorted names of the requests that are held, where they begin with `prefix`."""
        return sorted(name for name in self._texts if name.startswith(prefix))

    def figures(self) -> dict[str, float]:
        """The proposer's own, by its own names. Raises ProposerError."""
        if "metrics" not in self._loaded.methods:
            return {}
        prefix = prefix_of(self.plugin)
        return {name.removeprefix(prefix): value for name, value in self.host.told_metrics().items()}

    def call(self, method: str, path: Path) -> None:
        """Have the proposer `save` its state to a directory, `load` it, or take the weights of a file.

        Raises ProposerError, and ConfigError for weights that do not fit.
        """
        if method == "update_weights":
            self.host.update_weights(load_file(path))
        else:
            self.host.must(method, path)

    def close(self) -> None:
        """Save its state if that was asked for, and close it."""
        self.host.close()

    def _follows(self, name: str, row: Row) -> bool:
        text = self._texts.get(name)
        if text is None or row.start != len(text.request.token_ids):
            return False
        self._require_tokens(row.tokens, row.start + len(row.tokens), name)
        return bool(row.tokens)

    def _require_tokens(self, tokens: Sequence[int], length: int, name: str) -> None:
        if length > self.info.max_model_len or max(tokens, default=0) >= self.info.vocab_size:
            facts = {
                "request": name,
                "accepted": f"{self.info.max_model_len} tokens below {self.info.vocab_size}",
                "found": f"{length} tokens, the largest {max(tokens, default=0)}",
            }
            raise RequestError("SD-E331", "a client sent a text that is none of this target's", facts)

    def _answer(self, name: str, row: Row, drafts: dict[str, _Answer]) -> Drafted:
        text, length = self._texts.get(name), row.start + len(row.tokens)
        if text is not None and length == len(text.request.token_ids):
            token_ids, distribution = drafts.get(name, ([], None))
            if distribution is not None:
                return DrawnDraft(row.request_id, length, token_ids, DRAFTED, distribution)
            return Drafted(row.request_id, length, token_ids, DRAFTED)
        full = text is None and not self._rows.num_free
        return Drafted(row.request_id, length, [], FULL if full else UNKNOWN)

    def _drafted(self, rows: Sequence[tuple[_Text, Row]], drawn_with: Mapping[str, Drawing]) -> dict[str, _Answer]:
        """Drafts by the request's name."""
        steps = []
        for text, row in rows:
            request = text.request
            *before, newest = row.tokens
            drafts: list[int] = []
            if row.num_accepted == len(before) and request.num_uncomputed_tokens == 1 and self._states is None:
                drafts = _verified(before, text.draft, row.num_drafted)
                if drafts != text.draft[: len(drafts)]:
                    self._views.forget(request.row)
            else:
                request.token_ids += before
                before = []
            steps.append((request, drafts, [*before, newest], row.budget))
        self._catch_up([request for request, *_ in steps])
        shares = [
            (Scheduled(each, each.num_computed_tokens, each.num_uncomputed_tokens, len(drafts), True), drafts, outputs)
            for each, drafts, outputs, _ in steps
        ]
        names = [request.request_id for request, *_ in steps]
        drawings = [drawn_with[name] for name in names] if drawn_with else []
        chains = self._shown(shares, [budget for *_, budget in steps], drawings)
        if chains is None:
            return {}
        told = distributions_of(chains) if drawings else [None] * len(names)
        return dict(zip(names, zip(chains.token_ids, told, strict=True), strict=True))

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Show all but the newest tokens of texts that the proposer has not seen, at most `CHUNK` of each in a step."""
        longest = 1 if self._states is None else CHUNK  # where rejected drafts are not shown, one step shows all
        while behind := [each for each in requests if each.num_uncomputed_tokens > longest]:
            counts = [min(each.num_uncomputed_tokens - 1, CHUNK) for each in behind]
            shares: list[_Share] = [
                (Scheduled(each, each.num_computed_tokens, count, 0, False), [], [])
                for each, count in zip(behind, counts, strict=True)
            ]
            self._shown(shares, [0] * len(behind))

    @torch.inference_mode()
    def _shown(
        self, shares: Sequence[_Share], budgets: Sequence[int], drawings: Sequence[Drawing] = ()
    ) -> CheckedDraft | None:
        """Show the proposer one step, and check what it drafts. The draft is of chains."""
        if not shares:
            return None
        batch, committed, first = self._batch(shares), [], 0
        for share, drafts, outputs in shares:
            committed.append(self._progress.commit(share._replace(first_token=first), drafts, outputs))
            first += share.num_rows
        if self._keeps_kv:
            self._hold_blocks(committed)
        limited = [self._budget(each, budget) for each, budget in zip(committed, budgets, strict=True)]
        view, _ = self.host.views.build(committed, limited, batch)
        if drawings:
            view = with_drawings(view, drawings, self._loaded.needs.sampling)
        return self.host.draft(view, limited)

    def _batch(self, shares: Sequence[_Share]) -> Computed:
        """The step's states, and its tokens where the proposer is shown them with the rejected ones between."""
        tokens: list[int] = []
        positions: list[int] = []
        if self._reads_batch:
            for share, drafts, _ in shares:
                tokens += [*share.request.token_ids[share.start : share.start + share.num_tokens], *drafts]
                positions += range(share.start, share.start + share.num_tokens + len(drafts))
        device = torch.device(self.info.device)
        return Computed(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            [] if self._states is None else self._states.of([share for share, *_ in shares]),
        )

    def _hold_blocks(self, committed: Sequence[Committed]) -> None:
        for each in committed:
            self._rows.pool.extend(each.request.blocks, min(each.length, self.info.max_model_len) + self._lookahead)
        if self._table is not None:
            self._table.update((each.row, each.generation, each.request.blocks) for each in committed)

    def _budget(self, each: Committed, asked: int) -> int:
        budget = min(asked, self.num_draft_tokens, self.info.max_model_len - each.length)
        wanted = each.token_ids and self.host.wants_drafts_for(each.request.request_id)
        return budget if wanted and budget >= max(self._loaded.needs.min_draft_tokens, 1) else 0


def _client_of(name: str) -> str:
    return name.partition("/")[0]


def _verified(accepted: Sequence[int], answered: Sequence[int], num_drafted: int) -> list[int]:
    """The drafts that were verified, as far as they are known here: a client may have cut them, or used older ones."""
    if [*answered[: len(accepted)]] == [*accepted]:
        return [*answered[: max(num_drafted, len(accepted))]]
    return [*accepted]
