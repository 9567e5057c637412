"""The requests of a recording: turn by turn, each with what the target would have said past its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.core.config.sampling_params import SamplingParams
from specdec.sdk import ConfigError

from ..conversation import Exchange
from ..dataset_files import PromptRow
from ..prompts import params_of
from .reader import Recording
from .request import RecordedRequest
from .source import Ended, Source
from .tap import MOST_DRAFTS
from .writer import RecordingWriter

PAST = "{} (past its end)"


@dataclass(frozen=True)
class Asked:
    """A turn that was submitted."""

    row: PromptRow
    turn: int
    number: int
    token_ids: tuple[int, ...]  # [P]
    params: SamplingParams


class RecordingSession:
    """Feeds a source with all first turns, then all second ones, and so on; what is in the recording is not run."""

    def __init__(self, source: Source, writer: RecordingWriter, sampling: SamplingParams, *, chat: bool) -> None:
        self._source, self._writer, self._sampling, self._chat = source, writer, sampling, chat
        self._longest = int(writer.manifest.target["max_model_len"])
        self._said: dict[str, list[Exchange]] = {}  # by prompt id
        self._asked: dict[str, Asked] = {}  # by request id
        self._waiting: dict[str, Ended] = {}  # ended requests, by the id of the request that goes past their end
        self.prompts: list[tuple[int, ...]] = []  # of all requests
        self._done = {each.request_id: each for each in Recording.open(writer.folder) if writer.done}

    def run(self, rows: Sequence[PromptRow]) -> Iterator[Ended]:
        """Record every turn of every row. Yields requests as they end. Raises ConfigError SD-E168 if none fits."""
        number = 0
        for turn in range(max(len(row.turns) for row in rows)):
            for row in rows:
                exchanges = self._said.setdefault(row.prompt_id, [])
                if len(row.turns) > turn == len(exchanges):
                    self._add(row, turn, number)
                    number += 1
            while self._source.has_unfinished_requests:
                for ended in self._source.step():
                    yield from self._ended(ended)
        if not self.prompts:
            facts = {"room": f"max_model_len - output_len {self._sampling.max_tokens}"}
            raise ConfigError("SD-E168", "no prompt of the dataset fits the model", facts)

    def _add(self, row: PromptRow, turn: int, number: int) -> None:
        request_id = row.turn_id(turn)
        if request_id in self._done:
            done = self._done[request_id]
            self._said[row.prompt_id].append(Exchange(done.prompt_token_ids, done.token_ids))
            self.prompts.append(done.prompt_token_ids)
            return
        token_ids = tuple(self._source.texts.turn(row, self._said[row.prompt_id], chat=self._chat))
        if len(token_ids) > self._longest - self._sampling.max_tokens:
            self._writer.num_left_out += len(row.turns) - turn  # it and the turns after it
            return
        params = params_of(row, self._sampling, number)
        self._asked[request_id] = Asked(row, turn, number, token_ids, params)
        self.prompts.append(token_ids)
        self._source.add(request_id, token_ids, params)

    def _ended(self, ended: Ended) -> Iterator[Ended]:
        first = self._waiting.pop(ended.request_id, None)
        if first is not None:
            self._keep(first, ended.token_ids)
            yield first
        elif ended.finish_reason == "stop" and self._go_past(ended):
            return
        else:
            self._keep(ended, ())
            yield ended

    def _go_past(self, ended: Ended) -> bool:
        """Ask what follows the end, which drafts of a live run may agree with. Returns whether there is room."""
        asked = self._asked[ended.request_id]
        room = asked.params.max_tokens - len(ended.token_ids)
        if room <= 0:
            return False
        params = asked.params.replace(ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0)
        params = params.replace(max_tokens=min(room, MOST_DRAFTS), structured_outputs=None)
        name = PAST.format(ended.request_id)
        self._waiting[name] = ended
        self._source.add(name, [*asked.token_ids, *ended.token_ids], params, kept=False)
        return True

    def _keep(self, ended: Ended, past_token_ids: Sequence[int]) -> None:
        asked, kept = self._asked.pop(ended.request_id), self._source.take(ended.request_id)
        row = asked.row
        recorded = RecordedRequest(
            request_id=ended.request_id,
            number=asked.number,
            prompt_id=row.prompt_id,
            turn=asked.turn,
            category=row.category,
            prompt=row.turns[asked.turn] or self._source.texts.decode(asked.token_ids),
            text=self._source.texts.decode(ended.token_ids),
            seed=asked.params.seed or 0,
            prompt_token_ids=asked.token_ids,
            token_ids=ended.token_ids,
            past_token_ids=tuple(past_token_ids),
            finish_reason=ended.finish_reason,
            structured_outputs=asked.params.structured_outputs,
            **kept.probabilities,
        )
        self._said[row.prompt_id].append(Exchange(recorded.prompt_token_ids, recorded.token_ids))
        self._writer.add(recorded, kept.hidden, kept.logits)
