"""`specdec generate`: text from a model, with or without a proposer, and how each token came about."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.sdk import ConfigError

from ._engine_options import (
    ChatOption,
    ModelArgument,
    SpeculativeOption,
    only_one,
    silence_libraries,
)
from ._option_blocks import EngineOptions, OutputOptions, with_blocks
from ._session import Session
from ._text_view import Show, TextView
from ._why_live import print_misses, step_of

if TYPE_CHECKING:
    from specdec.core.config.sampling_params import SamplingParams
    from specdec.core.engine.outputs import StreamUpdate
    from specdec.core.llm import LLM
    from specdec.lab.dataset_files import PromptRow

STANDARD_INPUT = "-"
NUM_LOGPROBS = 20  # the most that a request may ask for


@with_blocks
def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated. -: standard input.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help='UTF-8 text with a prompt per line, or .jsonl with rows as of "custom".')
    ] = None,
    speculative_config: SpeculativeOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per prompt, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="0: off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sampling: the same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the output; may be repeated.")] = None,
    chat: ChatOption = False,
    show: Annotated[
        Show,
        typer.Option(
            help="tokens: what was accepted, rejected and sampled; steps: one line per target step; why: tokens, "
            "and for each rejected one what the target thought of it."
        ),
    ] = "plain",
    *,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Generate text, as it is produced, and show which tokens the proposer had right.

    As JSON, each prompt has a line with an object.
    """
    session: Session = ctx.obj
    how, quiet = output.form(session)
    proposer = only_one("--speculative-config", speculative_config)
    rows = _rows(prompt or [], prompts_file)
    silence_libraries()
    from specdec.core.config.sampling_params import SamplingParams
    from specdec.core.llm import LLM

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        logprobs=NUM_LOGPROBS if show == "why" else None,
    )
    config = engine.config(model)
    with LLM(speculative_config=proposer, plugin_settings=session.settings, **dict(config)) as llm:
        job, tokenizer = _Job(llm, rows, params, chat=chat), llm.get_tokenizer()
        if how == "json":
            job.run(_JsonView(job, with_steps=show != "plain"))
            return
        if tokenizer is None:
            raise typer.BadParameter(
                "text is shown, and the target has no tokenizer: --format json, or -ec '{\"tokenizer\": ...}'"
            )
        job.run(TextView(session.console(), show, tokenizer, job.texts))
        if show == "why":
            print_misses(job.misses(), tokenizer, session.console())
        if not quiet:
            print(job.summary(), file=sys.stderr)


def _rows(prompts: Sequence[str], prompts_file: Path | None) -> list[PromptRow]:
    """All prompts: those of --prompt, standard input in the place of a dash, then those of the file."""
    from specdec.lab.dataset_files import decode_utf8
    from specdec.lab.datasets import prompt_of, read_prompts

    if STANDARD_INPUT in prompts and sys.stdin is None:  # the shell has closed it
        raise typer.BadParameter("--prompt - reads standard input, which is closed: give --prompt TEXT")
    texts = [
        decode_utf8(sys.stdin.buffer.read(), "standard input") if text == STANDARD_INPUT else text for text in prompts
    ]
    rows = [prompt_of(text) for text in texts]
    if prompts_file is not None:
        rows += read_prompts(prompts_file)
    if not rows:
        raise typer.BadParameter("give a prompt: --prompt TEXT, --prompt - or --prompts-file FILE")
    several = next((row for row in rows if row.later_turns), None)
    if several is not None:
        facts = {
            "found": f"{len(several.turns)} turns",
            "fix": "a row with one turn, or `specdec bench`, which asks all",
        }
        raise ConfigError("SD-E162", f"{prompts_file}: prompt {several.prompt_id!r} has several turns", facts)
    return rows


@dataclass
class _Output:
    """What came of one prompt, step by step."""

    updates: list[StreamUpdate] = field(default_factory=list)
    seconds: float = 0.0  # until its last step

    @property
    def has_ended(self) -> bool:
        return bool(self.updates) and self.updates[-1].finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for update in self.updates for token_id in update.token_ids]

    def as_dict(self, *, with_steps: bool) -> dict[str, Any]:
        """The object that --format json prints."""
        from specdec.lab.measure import counts_of

        keys = ["draft_token_ids", "num_accepted", "token_ids", "text"]
        keys += ["draft_parents"] if any(update.draft_parents is not None for update in self.updates) else []
        keys += ["logprobs"] if self.updates[0].logprobs is not None else []
        steps = [{key: getattr(update, key) for key in keys} for update in self.updates]
        return {
            "text": "".join(update.text for update in self.updates),
            "token_ids": self.token_ids,
            "finish_reason": self.updates[-1].finish_reason,
            "seconds": self.seconds,
            "tokens_per_second": len(self.token_ids) / self.seconds,
            **counts_of(map(step_of, self.updates)).as_dict(),
            **({"steps": steps} if with_steps else {}),
        }


class _Job:
    """Prompts through an engine made for them, whose request ids are therefore the prompts' numbers."""

    def __init__(self, llm: LLM, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> None:
        from specdec.lab.conversation import Texts

        self._llm = llm
        self._params = [params.replace(structured_outputs=row.structured_outputs) for row in rows]
        known = Texts.of(llm.engine)
        self._prompts = [known.turn(row, (), chat=chat) for row in rows]
        self.texts = [row.prompt or known.decode(ids) for row, ids in zip(rows, self._prompts, strict=True)]
        self.outputs = [_Output() for _ in rows]
        self._seconds = 0.0

    def run(self, view: TextView | _JsonView) -> None:
        """Generate, and show each step as it happens."""
        start = time.perf_counter()
        for update in self._llm.stream([{"prompt_token_ids": ids} for ids in self._prompts], self._params):
            index = int(update.request_id)
            self.outputs[index].updates.append(update)
            self.outputs[index].seconds = time.perf_counter() - start
            view.update(index, update)
        self._seconds = time.perf_counter() - start

    def summary(self) -> str:
        """Sum up in one line of figures."""
        from specdec.lab.progress import counted

        metrics = self._llm.engine.metrics
        count = sum(len(output.token_ids) for output in self.outputs)
        return (
            f"{counted(count, 'token')}, {count / self._seconds:.1f} tokens/s, "
            f"acceptance length {metrics.acceptance.mean_acceptance_length:.2f}, "
            f"tokens per target step {metrics.acceptance.tokens_per_target_step:.2f}, proposer {metrics.proposer}"
        )

    def misses(self) -> list[list[dict[str, Any]]]:
        """What the target thought of each rejected token, by prompt."""
        from ._why_live import live_misses

        rows = zip(self._prompts, self.outputs, strict=True)
        return [live_misses(prompt, output.updates) for prompt, output in rows]

    def row(self, number: int, *, with_steps: bool) -> dict[str, Any]:
        """The object that --format json prints for a prompt."""
        row = {"prompt": self.texts[number], "num_prompt_tokens": len(self._prompts[number])}
        row["proposer"] = self._llm.engine.metrics.proposer
        return row | self.outputs[number].as_dict(with_steps=with_steps)


class _JsonView:
    """Prints one JSON object per prompt, each on a line, once it and those before it have ended."""

    def __init__(self, job: _Job, *, with_steps: bool) -> None:
        self._job, self._with_steps = job, with_steps
        self._num_printed = 0

    def update(self, index: int, update: StreamUpdate) -> None:
        """A step of the prompt at `index`, which the job has."""
        outputs = self._job.outputs
        while self._num_printed < len(outputs) and outputs[self._num_printed].has_ended:
            row = self._job.row(self._num_printed, with_steps=self._with_steps)
            print(json.dumps(row, ensure_ascii=False), flush=True)
            self._num_printed += 1
