"""Which prompts are run, as the token ids that every engine gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine
from specdec.core.host import parts_of
from specdec.core.registry import PluginSettings
from specdec.sdk import ConfigError, StrictModel
from specdec.sdk.ranges import Limit, LimitOrZero, Temperature

from .conversation import Exchange, Texts
from .dataset_files import PromptRow
from .datasets import load_dataset, of_category, spread


class PromptSettings(StrictModel):
    """Which prompts a target continues, and how."""

    engine: EngineConfig = Field(description="in a notebook its fields stand beside these")
    dataset_name: str = Field(
        default="packaged", description="or another of `dataset_files`, or one of the group `specdec.datasets`"
    )
    dataset_path: Path | None = Field(default=None, description="its file, for the data sets that have one")
    category: str | None = Field(default=None, description="None: all")
    num_prompts: LimitOrZero = Field(default=6, description="taken in turn from each category; 0: all that fit")
    chat: bool = Field(default=False, description="put each prompt into the model's chat template")
    output_len: Limit = Field(default=128, description="output tokens per prompt, at most")
    temperature: Temperature = Field(default=0.0, description="0: greedy")
    seed: int = Field(default=0, ge=0, lt=2**62, description="of the first prompt; each next one has one more")

    @property
    def sampling(self) -> SamplingParams:
        """The first prompt's sampling parameters. Output is not decoded: every engine would pay the same for it."""
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.output_len, detokenize=False
        )

    def rows(self, plugins: PluginSettings) -> list[PromptRow]:
        """The prompts to choose from. Raises what `load_dataset` and `of_category` raise."""
        return of_category(load_dataset(self.dataset_name, self.dataset_path, plugins), self.category)


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


def choose(rows: Sequence[PromptRow], count: int, params: SamplingParams, engine: Engine, *, chat: bool) -> Chosen:
    """`count` prompts in turn from each category (0: all), of those that leave room for `params.max_tokens`.

    A conversation is a prompt for each of its turns. What was said before a turn is generated here, so that each engine
    that is measured gets the same. The seed of prompt i is `params.seed` + i. Raises ConfigError SD-E168 if no prompt
    fits.
    """
    longest = parts_of(engine).plan.info.max_model_len
    limit, texts = longest - params.max_tokens, Texts.of(engine)
    first = {row.prompt_id: texts.turn(row, (), chat=chat) for row in rows}
    fitting = [row for row in rows if len(first[row.prompt_id]) <= limit]
    if not fitting:
        facts = {
            "shortest prompt": f"{min(map(len, first.values()))} tokens",
            "room": f"max_model_len {longest} - output_len {params.max_tokens} = {limit}",
        }
        raise ConfigError("SD-E168", "no prompt of the dataset fits the model", facts)
    chosen = spread(fitting, count)
    asked = {row.prompt_id: [first[row.prompt_id]] for row in chosen}
    num_left_out = _lay_out_turns(chosen, asked, limit, params, engine, chat=chat)
    turns = [(row, turn, ids) for row in chosen for turn, ids in enumerate(asked[row.prompt_id])]
    prompts = tuple(
        BenchPrompt(row.turn_id(turn), row.category, tuple(ids), params_of(row, params, number))
        for number, (row, turn, ids) in enumerate(turns)
    )
    return Chosen(prompts, len(rows) - len(fitting) + num_left_out)


def params_of(row: PromptRow, params: SamplingParams, number: int) -> SamplingParams:
    """What prompt `number` of a run is sampled with: a seed of its own, and the form that its row asks for."""
    return _in_form(row, params.replace(seed=(params.seed or 0) + number))


def _in_form(row: PromptRow, params: SamplingParams) -> SamplingParams:
    form = row.structured_outputs
    return params if form is None else params.replace(structured_outputs=form)


def _lay_out_turns(
    rows: Sequence[PromptRow],
    asked: dict[str, list[list[int]]],
    limit: int,
    params: SamplingParams,
    engine: Engine,
    *,
    chat: bool,
) -> int:
    """Put every later turn that fits behind its first one in `asked`. Returns how many do not fit."""
    said: dict[str, list[Exchange]] = {row.prompt_id: [] for row in rows}
    num_left_out = 0
    for turn in range(1, max(len(row.turns) for row in rows)):
        going_on = [row for row in rows if len(row.turns) > turn == len(asked[row.prompt_id])]
        wanted = {row.prompt_id: (asked[row.prompt_id][-1], _in_form(row, params)) for row in going_on}
        replies = _replies(engine, wanted)
        for row in going_on:
            said[row.prompt_id].append(Exchange(tuple(asked[row.prompt_id][-1]), replies[row.prompt_id]))
            ids = Texts.of(engine).turn(row, said[row.prompt_id], chat=chat)
            if len(ids) <= limit:
                asked[row.prompt_id].append(ids)
            else:
                num_left_out += len(row.turns) - turn
    return num_left_out


def _replies(engine: Engine, wanted: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> dict[str, tuple[int, ...]]:
    """What the target says to each prompt."""
    for prompt_id, (token_ids, params) in wanted.items():
        engine.add_request(list(token_ids), params, prompt_id)
    replies: dict[str, tuple[int, ...]] = {}
    while engine.has_unfinished_requests:
        ended = [each.request for each in engine.step() if each.request.finish_reason is not None]
        replies |= {request.request_id: tuple(request.output_token_ids) for request in ended}
    return replies


def prompts_sha256(prompts: Sequence[BenchPrompt]) -> str:
    """Hash of the prompts' ids, categories, tokens and forms, in the order in which they run."""
    rows = [[prompt.prompt_id, prompt.category, prompt.token_ids, *_form(prompt)] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _form(prompt: BenchPrompt) -> list[Any]:
    """What is asked of the answer's form, if anything is."""
    asked = prompt.params.structured_outputs
    return [] if asked is None else [asked.model_dump(mode="json")]
