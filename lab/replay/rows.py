"""Replays in the form of benchmarks: requests with their steps, and the times that a live run would take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.core.registry import PluginSettings
from specdec.sdk import ConfigError

from ..measure import Step
from ..recording import RecordedRequest, Recording
from ..result import step_facts
from ..token_texts import texts_of
from .assembly import tokenizer_of
from .run import Replayed, replay


def request_rows(recording: Recording, steps: Mapping[str, Sequence[Step]]) -> list[dict[str, Any]]:
    """One row per request, as benchmarks have them."""
    return [
        {
            "prompt_id": request.request_id,
            "category": request.category,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "output_token_ids": list(request.token_ids),
            "output_probabilities": _probabilities(request),
            **step_facts(steps.get(request.request_id, ())),
        }
        for request in recording
    ]


def _probabilities(request: RecordedRequest) -> list[float] | None:
    """The target's, of the output tokens. None means that they were not recorded."""
    probs: list[float] = request.token_logprobs.exp().tolist()
    return None if any(math.isnan(each) for each in probs) else [round(each, 5) for each in probs]


def predicted_seconds(recording: Recording, replayed: Replayed) -> list[float] | None:
    """Predict each request's seconds, from the recorded cost of a step and what the replay's proposer took.

    None means that the cost was not recorded, or that requests ran at the same time and have no times of their own.
    """
    if not has_times(recording):
        return None
    cost, names = recording.manifest.cost, recording.request_ids
    return [
        sum(map(cost.step_seconds, replayed.rows_of[name])) + replayed.live_propose_seconds_of(name) for name in names
    ]


def plain_seconds(recording: Recording, plugins: PluginSettings) -> list[float] | None:
    """Plain decoding's, predicted the same way."""
    return predicted_seconds(recording, replay(recording, None, plugins)) if has_times(recording) else None


def has_times(recording: Recording) -> bool:
    """Whether the times of its requests can be predicted."""
    return bool(recording.manifest.cost.rows) and recording.manifest.engine.get("max_num_seqs", 1) == 1


def refuse_drawn(replayed: Replayed, label: str) -> None:
    """Raise ConfigError SD-E251 if drafts were drawn and the text was sampled.

    Whether such a draft is accepted is a draw of its own. To count those that are the recorded text would rank
    proposers by sum of p q instead of sum of min(p, q).
    """
    if replayed.expected is not None:
        facts = {
            "found": f"{label}: drafts drawn from their distribution, and text that was sampled",
            "expected": "greedy drafts, or a recording of greedy text",
            "fix": 'leave "draft_sample_method" out, or measure a model with `specdec compare`; '
            "`specdec replay` prints bounds of what is expected",
        }
        raise ConfigError("SD-E251", "a recording does not tell which drawn drafts are accepted", facts)


def recorded_texts(recording: Recording, several: Sequence[Mapping[str, Sequence[Step]]]) -> dict[str, str]:
    """The text of every token that was put out or drafted, by its id, and of the ends of prompts."""
    token_ids = {token_id for request in recording for token_id in (*request.prompt_token_ids, *request.token_ids)}
    drafts = (step.draft_token_ids for each in several for steps in each.values() for step in steps)
    return texts_of(tokenizer_of(recording), token_ids | {token_id for draft in drafts for token_id in draft})


def recorded_cell(recording: Recording) -> dict[str, Any]:
    """What a result says of the recording itself."""
    manifest = recording.manifest
    return {
        "configuration": {
            "model": manifest.model,
            "recording": str(recording.folder),
            "dtype": manifest.target.get("dtype"),
            "device": manifest.target.get("device"),
            "top_m": manifest.top_m,
            "hidden_states": list(manifest.hidden_states),
            **{"dataset_name": "recording"} | manifest.dataset,
            "sampling": manifest.sampling,
        },
        "environment": manifest.environment,
        "num_prompts": len(recording),
        "num_prompts_skipped": 0,
    }
