"""A stage's scheduler and sampler. They follow the moves, and the script where the moves are silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.core.host import Request, RowTable, Schedule, Scheduled, rejection
from specdec.sdk.types import PADDING_TOKEN_ID

from .moves import Move
from .text import MOST_ACCEPTED, Script


class Scripted:
    """A stage's scheduler and its verification rule, of which the second knows what the first has planned."""

    def __init__(self, script: Script, rows: RowTable, lookahead: int) -> None:
        """`lookahead`: positions past the newest token that draft KV is written for."""
        self.requests: dict[str, Request] = {}
        self.moves: Sequence[Move] = ()  # of the next step
        self.rows = rows
        self._script = script
        self._lookahead = lookahead
        self._shares: list[Scheduled] = []

    def schedule(self, num_drafts: Callable[[Request], int]) -> Schedule:
        """Schedule the requests that the moves name."""
        self._shares, first_token = [], 0
        for move in self.moves:
            self._shares.append(self._share(move, num_drafts, first_token))
            first_token += self._shares[-1].num_rows
        return Schedule(self._shares, [])

    def finish(self, request: Request) -> None:
        """Release the request from the scheduler."""
        self.requests.pop(request.request_id, None)
        if request.row >= 0:
            self.rows.unseat(request)

    def verify(
        self,
        logits: Tensor,
        cu_rows: Tensor,
        drafts: rejection.DraftRows,
        sampling: rejection.SamplingRows,
        *,
        workspace: object = None,
    ) -> rejection.Verdict:
        """Decide acceptance and tokens by the moves and the script. Logits are ignored: there are none."""
        drafted = [ids[:n] for ids, n in zip(drafts.token_ids.tolist(), drafts.lengths.tolist(), strict=True)]
        paths = None
        if drafts.parents is not None:
            trees = zip(drafts.parents.tolist(), drafted, strict=True)
            paths = [some_path(parents[: len(ids)]) for parents, ids in trees]
            drafted = [[ids[node] for node in path] for path, ids in zip(paths, drafted, strict=True)]
        outputs = list(map(self._output, self.moves, self._shares, drafted))
        width = drafts.token_ids.shape[1] + 1
        num_accepted = torch.tensor([max(len(ids) - 1, 0) for ids in outputs])
        return rejection.Verdict(
            output_ids=torch.tensor([ids + [PADDING_TOKEN_ID] * (width - len(ids)) for ids in outputs]),
            num_accepted=num_accepted,
            status=torch.zeros_like(num_accepted),
            path=None if paths is None else _places(paths, outputs, width),
        )

    def _share(self, move: Move, num_drafts: Callable[[Request], int], first_token: int) -> Scheduled:
        request = self.requests[move.name]
        if request.row < 0:
            self.rows.seat(request)
        start, missing = request.num_computed_tokens, request.num_uncomputed_tokens
        num_tokens = missing if move.num_tokens is None else min(move.num_tokens, missing)
        drafts = num_drafts(request) if num_tokens == missing else 0
        self.rows.pool.extend(request.blocks, start + num_tokens + drafts + self._lookahead)
        return Scheduled(request, start, num_tokens, drafts, num_tokens == missing, first_token)

    def _output(self, move: Move, share: Scheduled, drafts: list[int]) -> list[int]:
        """Accepted drafts and one token more; none in the middle of a prompt."""
        if not share.samples:
            return []
        name, token_ids = move.name, share.request.token_ids
        accepted = self._script.num_accepted(name, len(token_ids), len(drafts))
        if move.num_accepted is not None:
            accepted = min(move.num_accepted, len(drafts), MOST_ACCEPTED)
        rejected = drafts[accepted] if accepted < len(drafts) else None
        following = move.forced
        if following is None:
            following = self._script.token(name, [*token_ids, *drafts[:accepted]], rejected)
        return [*drafts[:accepted], following]


def some_path(parents: Sequence[int]) -> list[int]:
    """A path from the root of a tree to a leaf: at every other place the last child instead of the first."""
    path: list[int] = []
    while True:
        above = path[-1] if path else -1
        children = [node for node, parent in enumerate(parents) if parent == above]
        if not children:
            return path
        path.append(children[-1 if len(path) % 2 == 0 else 0])


def _places(paths: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], width: int) -> Tensor:
    """The places that emit, [B, width], padded with -1."""
    emitting = [[0, *(node + 1 for node in path)][: len(ids)] for path, ids in zip(paths, outputs, strict=True)]
    return torch.tensor([each + [PADDING_TOKEN_ID] * (width - len(each)) for each in emitting])
