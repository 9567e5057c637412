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
    from specdec.lab.equality import Difference

EXIT_DIFFERENT = 1
STANDARD_INPUT = "-"
NUM_LOGPROBS = 20  # the most that a request may ask for
EQUAL_IN_DISTRIBUTION = (
    'With "draft_sample_method": "probabilistic", sampled outputs are equal in distribution, not token by token.'
)


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
    verify_equal: Annotated[
        bool, typer.Option("--verify-equal", help="Also decode plainly; exit code 1 if the tokens differ.")
    ] = False,
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
    settings = dict(engine.config(model)) | {"plugin_settings": session.settings}
    with LLM(speculative_config=proposer, **settings) as llm:
        job = _Job(llm, rows, params, chat=chat)
        view = None if how == "json" else TextView(session.console(), show, llm.get_tokenizer(), job.texts)
        job.run(view)
        if verify_equal:
            with LLM(**settings | {"model": llm.engine.config.model}) as plain:
                job.compare_with(plain)
        if show == "why" and view:
            print_misses(job.misses(), llm.get_tokenizer(), session.console())
        if how == "json":
            job.print_json(with_steps=show != "plain")
        elif not quiet:
            print(job.summary(), file=sys.stderr)
        if job.differences:
            print(f"Promised here: {llm.engine.text_equality.sentence}", file=sys.stderr)
        for difference in job.differences or ():
            print(difference.sentence(llm.get_tokenizer()), file=sys.stderr)
    if job.differences:
        if temperature > 0:
            print(EQUAL_IN_DISTRIBUTION, file=sys.stderr)
        raise typer.Exit(EXIT_DIFFERENT)


def _rows(prompts: Sequence[str], prompts_file: Path | None) -> list[PromptRow]:
    """All prompts: those of --prompt, standard input in the place of a dash, then those of the file."""
    from specdec.lab.dataset_files import decode_utf8
    from specdec.lab.datasets import prompt_of, read_prompts

    texts = [
        decode_utf8(sys.stdin.buffer.read(), "standard input") if text == STANDARD_INPUT else text for text in prompts
    ]
    rows = [prompt_of(text) for text in texts]
    if prompts_file is not None:
        rows += read_prompts(prompts_file)
    if not rows:
        raise typer.BadParameter("give a prompt: --prompt TEXT, --prompt - or --prompts-file FILE")
    return rows


@dataclass
class _Output:
    """What came of one prompt, step by step."""

    updates: list[StreamUpdate] = field(default_factory=list)
    seconds: float = 0.0  # until its last step

    @property
    def token_ids(self) -> list[int]:
        return [token_id for update in self.updates for token_id in update.token_ids]

    def as_dict(self, *, with_steps: bool) -> dict[str, Any]:
        """The object that --format json prints."""
        from specdec.core.request.metrics import RequestMetrics

        metrics = RequestMetrics()
        for update in self.updates:
            step = step_of(update)
            metrics.record(len(step.draft_token_ids), step.num_accepted, step.num_committed, step.widths)
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
            **metrics.as_dict(),
            **({"steps": steps} if with_steps else {}),
        }


class _Job:
    """Prompts through an engine made for them, whose request ids are therefore the prompts' numbers."""

    def __init__(self, llm: LLM, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> None:
        from specdec.lab.conversation import Texts

        self._llm = llm
        self._params = params
        known = Texts.of(llm.engine)
        self._prompts = [known.turn(row, (), chat=chat) for row in rows]
        self.texts = [row.prompt or known.decode(ids) for row, ids in zip(rows, self._prompts, strict=True)]
        self._outputs: list[_Output] = []
        self._seconds = 0.0
        self.differences: list[Difference] | None = None  # None: not compared

    def run(self, view: TextView | None) -> None:
        """Generate, and show each step as it happens."""
        start = time.perf_counter()
        self._outputs = self._stream(self._llm, view)
        self._seconds = time.perf_counter() - start

    def compare_with(self, plain: LLM) -> None:
        """Generate again with a plain engine and keep the differences."""
        from specdec.core.host import parts_of
        from specdec.lab.equality import compare

        assert parts_of(plain.engine).host is None, "outputs are compared with plain decoding's"
        expected = self._stream(plain, None)
        self.differences = compare(
            self._llm.engine,
            _numbered(self._prompts),
            _numbered([output.token_ids for output in expected]),
            _numbered([output.token_ids for output in self._outputs]),
        )

    def _stream(self, llm: LLM, view: TextView | None) -> list[_Output]:
        outputs = [_Output() for _ in self._prompts]
        start = time.perf_counter()
        for update in llm.stream([{"prompt_token_ids": ids} for ids in self._prompts], self._params):
            index = int(update.request_id)
            outputs[index].updates.append(update)
            outputs[index].seconds = time.perf_counter() - start
            if view:
                view.update(index, update)
        return outputs

    def summary(self) -> str:
        """Sum up in one line of figures, and one on equality if the user asked for it."""
        metrics = self._llm.engine.metrics
        count = sum(len(output.token_ids) for output in self._outputs)
        line = (
            f"{count} tokens, {count / self._seconds:.1f} tokens/s, "
            f"acceptance length {metrics.acceptance.mean_acceptance_length:.2f}, "
            f"tokens per target step {metrics.acceptance.tokens_per_target_step:.2f}, proposer {metrics.proposer}"
        )
        if self.differences is None:
            return line
        num_equal = len(self._outputs) - len(self.differences)
        return f"{line}\nOutputs equal to plain decoding: {num_equal}/{len(self._outputs)}"

    def misses(self) -> list[list[dict[str, Any]]]:
        """What the target thought of each rejected token, by prompt."""
        from ._why_live import live_misses

        rows = zip(self._prompts, self._outputs, strict=True)
        return [live_misses(prompt, output.updates) for prompt, output in rows]

    def print_json(self, *, with_steps: bool) -> None:
        """Print one JSON object per prompt, each on a line."""
        different = {difference.prompt_id: difference for difference in self.differences or ()}
        proposer = self._llm.engine.metrics.proposer
        for number, (text, output) in enumerate(zip(self.texts, self._outputs, strict=True)):
            row = {"prompt": text, "num_prompt_tokens": len(self._prompts[number]), "proposer": proposer}
            row |= output.as_dict(with_steps=with_steps)
            if self.differences is not None:
                difference = different.get(str(number))
                row |= {"outputs_equal": difference is None}
                row |= {"difference": difference.as_dict(self._llm.get_tokenizer()) if difference else None}
            print(json.dumps(row, ensure_ascii=False))


def _numbered(rows: Sequence[list[int]]) -> dict[str, list[int]]:
    return {str(number): row for number, row in enumerate(rows)}
