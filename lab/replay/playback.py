"""The target of a replay: its hidden states and its verdicts are those of the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import torch
from torch import Tensor

from specdec.core.host import ForwardInput, Request, Schedule, Scheduled, Scheduler, TargetOutput
from specdec.core.model.hidden_states import HiddenState
from specdec.core.rejection.types import DraftRows, SamplingRows, Verdict
from specdec.sdk.types import PADDING_TOKEN_ID

from ..recording import RecordedRequest, Recording
from .caches import Caches
from .expected import ExpectedAcceptance

HiddenLayers = Sequence[HiddenState]
Listener = Callable[[DraftRows, Sequence[tuple[RecordedRequest, int]], Sequence[int]], None]


class Playback:
    """Stands in for a target, its scheduler and its verification rule, of which two know what the first has planned."""

    _scheduler: Scheduler  # the engine's own, once `on` was called

    def __init__(self, recording: Recording, hidden_states: HiddenLayers, device: torch.device) -> None:
        """`hidden_states`: those that the proposer is shown."""
        self._recording, self._device = recording, device
        self._requests = {each.request_id: each for each in recording}
        self._columns = _columns(recording, hidden_states)
        self._hidden: dict[str, Tensor] = {}  # of the requests that run
        self._shares: list[Scheduled] = []
        self.expected = ExpectedAcceptance(recording.manifest.top_m)
        self.teacher_forced = False  # True: no draft is accepted, so that the proposer drafts at every position
        self.caches = Caches()
        self.listeners: list[Listener] = [self.expected.record]  # told of the distributions of sampled steps

    def on(self, scheduler: Scheduler) -> tuple[Playback, Playback, Callable[..., Verdict]]:
        """Stand in for the target, the scheduler and the verification rule, as `StandIn` says."""
        self._scheduler = scheduler
        return self, self, self.verify

    def schedule(self, num_drafts: Callable[[Request], int]) -> Schedule:
        """Let the engine's own scheduler plan, and remember the plan."""
        plan = self._scheduler.schedule(num_drafts)
        self._shares = plan.shares
        return plan

    def finish(self, request: Request) -> None:
        """Let the engine's own scheduler release the request."""
        self._hidden.pop(request.request_id, None)
        self._scheduler.finish(request)

    def forward(self, inputs: ForwardInput) -> TargetOutput:
        """Return recorded hidden states, and no logits. Rows of drafts get the states of the recorded text."""
        self.caches.pass_of_target()
        logits = torch.empty(len(inputs.logits_rows), 0, device=self._device)
        if not self._columns:
            return TargetOutput(logits, ())
        counts = [each.num_tokens + each.num_draft_tokens for each in self._shares]
        positions = torch.split(inputs.positions.cpu(), counts)
        states = torch.cat([self._states(*each) for each in zip(self._shares, positions, strict=True)])
        return TargetOutput(logits, states.to(self._device).chunk(len(self._columns), dim=1))

    def verify(
        self, logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, *, workspace: object = None
    ) -> Verdict:
        """A draft is accepted as long as it is what the target said. There are no logits."""
        drafted, lengths = drafts.token_ids.tolist(), drafts.lengths.tolist()
        parents = repeat(None) if drafts.parents is None else drafts.parents.tolist()
        said = [self._said(share, length + 1) for share, length in zip(self._shares, lengths, strict=True)]
        columns = zip(drafted, lengths, parents, said, strict=False)
        nodes = [[] if self.teacher_forced else _accepted(ids[:n], above, told) for ids, n, above, told in columns]
        if drafts.distributions is not None and not sampling.all_greedy:
            self._expect(drafts, [len(each) + 1 for each in nodes])
        width = drafts.token_ids.shape[1] + 1
        outputs = [_output(told, len(each)) for told, each in zip(said, nodes, strict=True)]
        padded = self._table(outputs, width)
        accepted = [len(each) for each in nodes]
        num_accepted = torch.tensor(accepted, device=self._device)
        path = [[0, *(node + 1 for node in each)] if told else [] for told, each in zip(said, nodes, strict=True)]
        return Verdict(
            output_ids=padded,
            num_accepted=num_accepted,
            status=torch.zeros_like(num_accepted),
            on_host=[[count, 0, *ids] for count, ids in zip(accepted, padded.tolist(), strict=True)],
            path=None if drafts.parents is None else self._table(path, width),
        )

    def _table(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        padded = [[*ids, *[PADDING_TOKEN_ID] * (width - len(ids))] for ids in rows]
        return torch.tensor(padded, device=self._device).reshape(len(rows), width)

    def _said(self, share: Scheduled, count: int) -> list[int]:
        """What the target said next, `count` tokens where they are known; none in the middle of a prompt."""
        if not share.samples:
            return []
        recorded, start = self._requests[share.request.request_id], share.request.num_output_tokens
        return [*recorded.token_ids[start : start + count], *_past(recorded, start, count)]

    def _states(self, share: Scheduled, positions: Tensor) -> Tensor:
        name = share.request.request_id
        if name not in self._hidden:
            if len(self._requests[name].token_ids) < 2:  # it ends before its states are shown to anybody
                dtype = getattr(torch, self._recording.manifest.target["dtype"])
                states = torch.zeros(1, max(part.stop for part in self._columns), dtype=dtype)
            else:
                states = self._recording.hidden_states(name)
            self._hidden[name] = torch.cat([states[:, part] for part in self._columns], dim=1)
        states = self._hidden[name]
        return states[positions.clamp(max=len(states) - 1)]

    def _expect(self, drafts: DraftRows, reached: Sequence[int]) -> None:
        rows = [(self._requests[share.request.request_id], share.request.num_output_tokens) for share in self._shares]
        for listener in self.listeners:
            listener(drafts, rows, reached)


def _accepted(drafts: Sequence[int], parents: Sequence[int] | None, said: Sequence[int]) -> list[int]:
    """The numbers of the drafts that were said, one after the other. parents: None means a chain."""
    nodes: list[int] = []
    above = range(-1, len(drafts) - 1) if parents is None else parents
    for token_id in said:
        end = nodes[-1] if nodes else -1
        pairs = enumerate(zip(above, drafts, strict=False))
        child = next((node for node, pair in pairs if pair == (end, token_id)), None)
        if child is None:
            break
        nodes.append(child)
    return nodes


def _output(said: Sequence[int], num_accepted: int) -> list[int]:
    """The drafts that were said, and one token more. Where nothing is known past the end, nobody sees that token."""
    following = list(said[num_accepted : num_accepted + 1])
    return [*said[:num_accepted], *(following or [0])] if said else []


def _past(recorded: RecordedRequest, start: int, count: int) -> tuple[int, ...]:
    """What it said past its end, as far as that is asked for."""
    missing = start + count - len(recorded.token_ids)
    return recorded.past_token_ids[: max(missing, 0)]


def _columns(recording: Recording, wanted: HiddenLayers) -> list[slice]:
    """Where each wanted layer lies in what was recorded."""
    size, layers = recording.manifest.target.get("hidden_size", 0), list(recording.manifest.hidden_states)
    return [slice(layers.index(each) * size, (layers.index(each) + 1) * size) for each in wanted]
