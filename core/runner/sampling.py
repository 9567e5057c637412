"""Logits after grammars, bias, min_tokens and penalties; log-probabilities that are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache.transfer import upload
from ..kernels.backend import backend_of
from ..request.grammar import unpacked
from ..request.request import Request

Drafted = Callable[[], tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]]
"""The drafts of each request, and the parents of each node; None: chains."""

_NEVER = float("-inf")


def mask_logits(logits: Tensor, requests: Sequence[Request], bounds: Sequence[int], drafts: Drafted) -> None:
    """Bar in place what the grammars of requests refuse, as plain decoding would bar it at each place.

    logits [R, V]: request b has rows `bounds[b]` to `bounds[b + 1]`, of its newest token and each of its drafts. A
    draft that is refused stays, and has probability 0 in the row before it.
    """
    masked = [b for b, each in enumerate(requests) if each.grammar is not None and bounds[b] < bounds[b + 1]]
    if not masked:
        return
    token_ids, parents = drafts()
    for b in masked:
        grammar, rows = requests[b].grammar, logits[bounds[b] : bounds[b + 1]]
        assert grammar is not None, "those that have one"
        words = grammar.masks(token_ids[b], None if parents is None else parents[b])
        rows.masked_fill_(unpacked(~words, logits.shape[1]).to(logits.device), _NEVER)


class _Sent(NamedTuple):
    """What is asked for, of E tokens of A requests. Their drafts come first, the ids of which the device knows."""

    of: Tensor  # [E] int64, among the A requests
    ids: Tensor  # [E] int64
    barred: Tensor  # [E] int64, rows in which a token is barred
    repeated: Tensor  # [E] int64, 1 where it stands in the text
    counts: Tensor  # [E] int64, how often it was put out
    requests: Tensor  # [A] int64, among the batch's
    first: Tensor  # [A] int64, row of the logits
    last: Tensor  # [A] int64, drafts behind which it still has a row
    bias: Tensor  # [E] float32
    factor: Tensor  # [A] float32, of repetition
    frequency: Tensor  # [A] float32
    presence: Tensor  # [A] float32


def adjust_logits(
    logits: Tensor,
    requests: Sequence[Request],
    bounds: Sequence[int],
    drafts: Tensor,
    parents: Tensor | None = None,
) -> None:
    """Apply bias, min_tokens and penalties in place to the requests that ask for any, from one upload.

    logits [R, V]: request b has rows `bounds[b]` to `bounds[b + 1]`. drafts [B, K] lie where the logits do, and the
    host need not know them. Row i of a request follows its committed tokens and its first i drafts, and is adjusted as
    plain decoding would adjust it there. Repetition looks at prompt and output, frequency and presence at the output.
    Tokens that nothing was asked for are not touched. With `parents` [B, K] drafts are nodes of trees, and row i
    follows the path to node i - 1.
    """
    asked = [b for b, each in enumerate(requests) if each.adjusts_logits and bounds[b] < bounds[b + 1]]
    width = drafts.shape[1]
    entries: list[Sequence[float]] = [(place, *_NO_CHANGE) for place in range(len(asked)) for _ in range(width)]
    num_drafted = len(entries)
    for place, b in enumerate(asked):
        entries += [(place, *change) for change in _changes(requests[b])]
    if not entries:
        return
    *columns, bias = zip(*entries, strict=True)
    params = [requests[b].params for b in asked]
    integers = [*columns, asked, [bounds[b] for b in asked], [bounds[b + 1] - bounds[b] - 1 for b in asked]]
    penalties = zip(*[(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], strict=True)
    sent = _Sent(*upload(integers, logits.device, [bias, *penalties]))
    drafted = drafts[sent.requests].clamp(min=0)  # a row behind a place without a draft is not looked at
    sent.ids[:num_drafted] = drafted.flatten()
    before = places = torch.arange(width + 1, device=logits.device).minimum(sent.last[sent.of, None])  # [E, K + 1]
    times = pad((drafted[sent.of] == sent.ids[:, None]).cumsum(1), (1, 0)).gather(1, places)
    if parents is not None:
        paths = _paths(parents[sent.requests])[sent.of]  # [E, K + 1, K]
        same = (drafted[sent.of] == sent.ids[:, None])[:, None]
        before, times = (each.sum(2).gather(1, places) for each in (paths, paths & same))
    rows, ids = sent.first[sent.of, None] + places, sent.ids[:, None].expand_as(places)
    adjusted = _adjusted(logits[rows, ids], before, times, sent)
    for part in (slice(num_drafted), slice(num_drafted, None)):  # where the host knows a drafted token, that holds
        logits[rows[part], ids[part]] = adjusted[part]


def _paths(parents: Tensor) -> Tensor:
    """Which nodes lie on the path to each place: [A, K + 1, K] bool."""
    ancestors, _ = backend_of(parents.device.type).tree_masks(parents)
    nodes = torch.arange(parents.shape[1], device=parents.device)
    return pad((ancestors[:, :, None] >> nodes) & 1 == 1, (0, 0, 1, 0))


def _adjusted(logits: Tensor, before: Tensor, times: Tensor, sent: _Sent) -> Tensor:
    """Logits [E, K + 1] of tokens that follow `before` drafts and were drafted so many `times` among these."""
    of, precise = sent.of[:, None], torch.promote_types(logits.dtype, torch.float32)

    def applied(values: Tensor) -> Tensor:
        return values.to(logits.dtype).to(precise)  # what each change leaves is rounded, as if it stood alone

    seen = applied(logits.to(precise) + sent.bias[:, None]).masked_fill(before < sent.barred[:, None], _NEVER)
    factor = sent.factor[of].masked_fill(sent.repeated[:, None] + times == 0, 1).to(precise)
    seen = applied(torch.where(seen > 0, seen / factor, seen * factor))
    counts = sent.counts[:, None] + times
    subtracted = applied(sent.frequency[of].to(precise) * counts + sent.presence[of] * (counts > 0))
    return (seen - subtracted).to(logits.dtype)


_NO_CHANGE = (0, 0, 0, 0, 0.0)


def _changes(request: Request) -> list[Sequence[float]]:
    """List the tokens whose logits change: id, rows in which it is barred, whether it is repeated, how often it was
    output, bias.
    """
    params = request.params
    bias = params.logit_bias or {}
    num_barred = params.min_tokens - request.num_output_tokens
    yields = request.grammar is not None and num_barred > 0 and request.grammar.allows_only(request.end_token_ids)
    barred = request.end_token_ids if num_barred > 0 and not yields else frozenset()
    outputs = request.output_counts
    repeated = request.prompt_counts | outputs if params.repetition_penalty != 1 else Counter[int]()
    return [
        (
            token_id,
            num_barred if token_id in barred else 0,
            token_id in repeated,
            outputs[token_id],
            bias.get(token_id, 0.0),
        )
        for token_id in {*bias, *barred, *repeated, *outputs}
    ]


def likely(logprobs: Tensor, emitted: Tensor, count: int) -> Tensor:
    """What is kept of logprobs [n, V]: ids and values of the `count` largest, and of `emitted` [>= n], -1 padded.

    float64 [n, 2 * (count + 1)], which holds a token id exactly.
    """
    top, ids = logprobs.topk(count), emitted[: len(logprobs), None]
    own = logprobs.gather(1, ids.clamp(min=0))
    return torch.cat([top.indices, ids, top.values.double(), own.double()], dim=1).double()


def on_its_way(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same on the host. It may be read after anything else of the device that was asked for later."""
    flat = torch.cat([each.flatten() for each in packed.values()]).to("cpu", non_blocking=True)
    parts = torch.split(flat, [each.numel() for each in packed.values()])
    return {name: part.view(each.shape) for (name, each), part in zip(packed.items(), parts, strict=True)}


def read_likely(packed: Mapping[str, Tensor]) -> dict[str, list[dict[int, float]]]:
    """Log-probabilities by request: of each row, by token id, from what `likely` packed."""
    found: dict[str, list[dict[int, float]]] = {}
    for name, each in packed.items():
        half = each.shape[1] // 2
        found[name] = [dict(zip(map(int, row[:half]), row[half:], strict=True)) for row in each.tolist()]
    return found
