"""A proposer that writes down everything that it is told and shown, field by field."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specdec.sdk import Draft, Needs, ProposerConfig, RequestView, StepView, StrictModel

VOCAB_SIZE = 64
NOT_FIELDS = {"requests", "kept", "rejected", "sampling", "history", "random"}  # of a view; they are written as parts
ROUNDED = {"top_logprobs"}  # which machines compute differently; where they are finite is compared
WITHIN_REQUESTS = {"num_kept", "kept_start", "num_rejected", "start"}  # [B]; other tensors of tokens are [N]


class Recorder:
    """Drafts the rest of a text that it knows, or counts on from the newest token. A tree has two branches.

    `entries` has one dictionary for each call: fields by name, and where a field belongs to requests, by request id.
    """

    class Options(StrictModel):
        needs: Mapping[str, Any] = Field(default={})
        texts: tuple[tuple[int, ...], ...] = ()

    class RequestOptions(StrictModel):
        colour: str = "none"

    @classmethod
    def needs(cls, config: ProposerConfig, target: object) -> Needs:
        return Needs(history=True, **config.options.needs)

    def __init__(self, config: ProposerConfig) -> None:
        self.texts = config.options.texts
        self.draws_trees = "trees@1" in config.options.needs.get("extensions", ())
        self.entries: list[dict[str, Any]] = []

    def on_start(self, request: RequestView) -> None:
        self.entries.append({"call": "on_start"} | by_request(request, request_fields(request)))

    def on_preempt(self, request: RequestView) -> None:
        self.entries.append({"call": "on_preempt"} | by_request(request, request_fields(request)))

    def on_finish(self, request: RequestView) -> None:
        self.entries.append({"call": "on_finish"} | by_request(request, request_fields(request)))

    def observe(self, step: StepView) -> None:
        self.entries.append({"call": "observe"} | step_fields(step))

    def propose(self, step: StepView) -> Draft:
        self.entries.append({"call": "propose", "budget": per_request(step, step.budget)})
        if step.kept.token_ids.is_cpu and not self.draws_trees:
            return Draft.from_lists([self.draft(step, place) for place in range(len(step))], step.width)
        return Draft.from_trees([self.tree(step, place) for place in range(len(step))], step.width)

    def draft(self, step: StepView, place: int) -> list[int]:
        budget, newest = int(step.budget[place]), int(step.newest_token[place])
        prompt, length = tuple(step.requests[place].prompt_token_ids), int(step.committed_length[place])
        for text in self.texts:
            if text[: len(prompt)] == prompt:
                return list(text[length : length + budget])
        return [(newest + 1 + drafted) % VOCAB_SIZE for drafted in range(budget)]

    def tree(self, step: StepView, place: int) -> list[tuple[int, int]]:
        """Parents and tokens."""
        newest = int(step.newest_token[place])
        return [(max(node - 2, -1), (newest + 1 + node) % VOCAB_SIZE) for node in range(int(step.budget[place]))]


def step_fields(step: StepView) -> dict[str, Any]:
    """All that a view shows."""
    requests = {each.request_id: request_fields(each) for each in step.requests}
    shown: dict[str, Any] = {
        "requests": requests,
        "length": len(step),
        "num_committed": per_request(step, step.num_committed),
    }
    for field in fields(step):
        value = getattr(step, field.name)
        if field.name not in NOT_FIELDS:
            shown[field.name] = per_request(step, value) if isinstance(value, Tensor) else value
    shown["random"] = per_request(step, torch.stack([step.random.uniform(i) for i in range(step.width)], dim=1))
    shown |= {f"kept.{name}": value for name, value in token_fields(step, step.kept).items()}
    if step.sampling is not None:
        for field in fields(step.sampling):
            value = getattr(step.sampling, field.name)
            shown[f"sampling.{field.name}"] = per_request(step, value) if isinstance(value, Tensor) else value
    if step.history is not None:
        ids = step.request_ids
        shown["history.tail"] = per_request(step, step.history.tail(3))
        shown["history.digest"] = {ids[b]: digest(torch.tensor(step.history.token_ids(b))) for b in range(len(ids))}
        shown["history.of"] = {ids[b]: plain(step.history.of(b, int(step.kept.kept_start[b]))) for b in range(len(ids))}
    if step.rejected is not None:
        shown |= {f"rejected.{name}": value for name, value in token_fields(step, step.rejected).items()}
    return shown


def token_fields(step: StepView, tokens: Any) -> dict[str, Any]:
    """Of kept or of rejected tokens. What a request does not own is not looked at: it may hold anything."""
    kept = tokens is step.kept
    starts = (tokens.token_offsets if kept else tokens.start).tolist()
    counts = (tokens.num_kept if kept else tokens.num_rejected).tolist()
    shown: dict[str, Any] = {}
    for field in fields(tokens):
        value = getattr(tokens, field.name)
        if field.name == "token_offsets":
            shown[field.name] = plain(value)
        elif field.name in WITHIN_REQUESTS:
            shown[field.name] = per_request(step, value)
        elif isinstance(value, Tensor):
            if field.name in ROUNDED:
                value = value.isfinite()
            shown[field.name] = owned(step, value, starts, counts)
        elif field.name == "hidden":
            shown |= {f"hidden[{i}]": owned(step, each, starts, counts) for i, each in enumerate(value)}
        else:
            shown[field.name] = value
    return shown


def owned(step: StepView, values: Tensor, starts: list[int], counts: list[int]) -> dict[str, Any]:
    """[N, ...] by request id."""
    ids = step.request_ids
    return {ids[b]: plain(values[starts[b] : starts[b] + counts[b]]) for b in range(len(ids))}


def per_request(step: StepView, values: Tensor) -> dict[str, Any]:
    """[B, ...] by request id."""
    return {name: plain(each) for name, each in zip(step.request_ids, values, strict=True)}


def request_fields(request: RequestView) -> dict[str, Any]:
    end = None if request.end is None else dict(vars(request.end))
    ids = [*request.prompt_token_ids]
    return dict(vars(request)) | {"prompt_token_ids": ids, "options": dict(request.options), "end": end}


def by_request(request: RequestView, shown: dict[str, Any]) -> dict[str, Any]:
    return {name: {request.request_id: value} for name, value in shown.items()}


def plain(values: Tensor) -> Any:
    """Integers as they are. Of floats the type, the shape and a digest: the stage's are exact."""
    if not values.is_floating_point():
        return values.tolist()
    if values.dim() == 0:
        return values.item()
    return f"{values.dtype}{list(values.shape)} {digest(values)}"


def digest(values: Tensor) -> str:
    return hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=6).hexdigest()
