"""The requests of a recording: turn by turn, each with what the target would have said past its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine, finish_reason_of
from specdec.core.host import EngineView
from specdec.core.request.request import FinishReason, Request
from specdec.sdk import ConfigError

from ..conversation import Exchange, turn_id, turn_prompt
from ..dataset_files import PromptRow
from .reader import Recording
from .request import RecordedRequest
from .tap import MOST_DRAFTS, ProbabilityTap, RecordingTap
from .writer import RecordingWriter

PAST = "{} (past its end)"


class RecordingSession:
    """Feeds an engine with all first turns, then all second ones, and so on; what is in the recording is not run."""

    def __init__(
        self,
        engine: Engine,
        tap: RecordingTap,
        listener: ProbabilityTap,
        writer: RecordingWriter,
        sampling: SamplingParams,
        *,
        chat: bool,
    ) -> None:
        self._engine, self._tap, self._listener, self._writer = engine, tap, listener, writer
        self._sampling, self._chat = sampling, chat
        self._said: dict[str, list[Exchange]] = {}  # by prompt id
        self._rows: dict[str, tuple[PromptRow, int, int]] = {}  # by request id: the row, the turn, the number
        self._waiting: dict[str, Request] = {}  # ended requests, by the id of the request that goes past their end
        self.prompts: list[tuple[int, ...]] = []  # of all requests
        self._done = {each.request_id: each for each in Recording.open(writer.folder) if writer.done}

    def run(self, rows: Sequence[PromptRow]) -> Iterator[Request]:
        """Record every turn of every row. Yields requests as they end. Raises ConfigError SD-E168 if none fits."""
        number = 0
        for turn in range(max(len(row.turns) for row in rows)):
            for row in rows:
                exchanges = self._said.setdefault(row.prompt_id, [])
                if len(row.turns) > turn == len(exchanges):
                    self._add(row, turn, number)
                    number += 1
            while self._engine.has_unfinished_requests:
                yield from self._step()
        if not self.prompts:
            facts = {"room": f"max_model_len - output_len {self._sampling.max_tokens}"}
            raise ConfigError("SD-E168", "no prompt of the dataset fits the model", facts)

    def _add(self, row: PromptRow, turn: int, number: int) -> None:
        request_id = turn_id(row, turn)
        if request_id in self._done:
            done = self._done[request_id]
            self._said[row.prompt_id].append(Exchange(done.prompt_token_ids, done.token_ids))
            self.prompts.append(done.prompt_token_ids)
            return
        token_ids = turn_prompt(self._engine, row, self._said[row.prompt_id], chat=self._chat)
        if len(token_ids) > EngineView.of(self._engine).info.max_model_len - self._sampling.max_tokens:
            return  # it and the turns after it are left out
        params = self._sampling.replace(seed=(self._sampling.seed or 0) + number)
        self._rows[request_id] = row, turn, number
        self._listener.params[request_id] = params
        self.prompts.append(tuple(token_ids))
        self._engine.add_request(token_ids, params, request_id)

    def _step(self) -> Iterator[Request]:
        committed = self._engine.step()
        if self._listener.error is not None:
            raise self._listener.error
        for each in committed:
            if each.request.finish_reason is not None:
                yield from self._ended(each.request)

    def _ended(self, request: Request) -> Iterator[Request]:
        first = self._waiting.pop(request.request_id, None)
        if first is not None:
            self._tap.take(request.request_id)
            self._keep(first, request.output_token_ids)
            yield first
        elif request.finish_reason is FinishReason.STOP and self._go_past(request):
            return
        else:
            self._keep(request, [])
            yield request

    def _go_past(self, request: Request) -> bool:
        """Ask what follows the end, which drafts of a live run may agree with. Returns whether there is room."""
        room = request.max_total_tokens - len(request.token_ids)
        if room <= 0 or request.penalised:
            return False
        params = request.params.replace(ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0)
        params = params.replace(max_tokens=min(room, MOST_DRAFTS), seed=request.seed)
        name = PAST.format(request.request_id)
        self._waiting[name] = request
        self._engine.add_request(request.token_ids, params, name)
        return True

    def _keep(self, request: Request, past_token_ids: Sequence[int]) -> None:
        row, turn, number = self._rows.pop(request.request_id)
        probabilities, logits = self._listener.take(request.request_id)
        tokenizer, output = self._engine.tokenizer, request.output_token_ids
        recorded = RecordedRequest(
            request_id=request.request_id,
            number=number,
            prompt_id=row.prompt_id,
            turn=turn,
            category=row.category,
            prompt=row.turns[turn],
            text="" if tokenizer is None else tokenizer.decode(output, skip_special_tokens=True),
            seed=request.seed,
            prompt_token_ids=tuple(request.prompt_token_ids),
            token_ids=tuple(output),
            past_token_ids=tuple(past_token_ids),
            finish_reason=finish_reason_of(request) or "abort",
            **probabilities,
        )
        self._said[row.prompt_id].append(Exchange(recorded.prompt_token_ids, recorded.token_ids))
        self._writer.add(recorded, self._tap.take(request.request_id), logits)
