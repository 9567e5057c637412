"""From texts to the token ids that every engine gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine
from specdec.sdk import ConfigError

from .datasets import PromptRow, spread


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as every engine gets it."""

    prompt_id: str
    category: str
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Chosen:
    """The prompts of a run."""

    prompts: tuple[BenchPrompt, ...]
    num_skipped: int  # left out because prompt and output are longer than the model takes


def encode(engine: Engine, prompt: str, chat: bool) -> list[int]:
    """A prompt's token ids, as they are or as the first message of a conversation. Raises RequestError."""
    return engine.encode_chat([{"role": "user", "content": prompt}]) if chat else engine.encode(prompt)


def choose(rows: Sequence[PromptRow], count: int, params: SamplingParams, engine: Engine, *, chat: bool) -> Chosen:
    """`count` prompts in turn from each category (0: all), of those that leave room for `params.max_tokens`.

    The seed of prompt i is `params.seed` + i. Raises ConfigError SD-E168 if no prompt fits.
    """
    longest = engine.parts.info.max_model_len
    limit = longest - params.max_tokens
    token_ids = {row.prompt_id: tuple(encode(engine, row.prompt, chat)) for row in rows}
    fitting = [row for row in rows if len(token_ids[row.prompt_id]) <= limit]
    if not fitting:
        facts = {
            "shortest prompt": f"{min(map(len, token_ids.values()))} tokens",
            "room": f"max_model_len {longest} - output_len {params.max_tokens} = {limit}",
        }
        raise ConfigError("SD-E168", "no prompt of the dataset fits the model", facts)
    prompts = tuple(
        BenchPrompt(
            row.prompt_id,
            row.category,
            token_ids[row.prompt_id],
            params.replace(seed=(params.seed or 0) + number),
        )
        for number, row in enumerate(spread(fitting, count))
    )
    return Chosen(prompts, len(rows) - len(fitting))


def prompts_sha256(prompts: Sequence[BenchPrompt]) -> str:
    """Hash of the prompts' ids, categories and tokens, in the order in which they run."""
    rows = [[prompt.prompt_id, prompt.category, prompt.token_ids] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
