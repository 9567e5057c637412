"""Rounds in which every contender runs once, in turn and in turned order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from .contender import Batch, Contender, Task
from .worker import RefusedError, Run, Worker


class Race:
    """The contenders' processes. Engines stay loaded between turns; vLLM's hold one model per process."""

    def __init__(self, task: Task, clock: str, engine_log: Path, say: Callable[[str], None]) -> None:
        self._task, self._clock, self._engine_log, self._say = task, clock, engine_log, say
        self._workers: dict[str, Worker] = {}
        self._stack = ExitStack()
        self.refused: dict[Contender, str] = {}

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, contenders: Sequence[Contender], batches: Sequence[Batch], rounds: int, deadline: float
    ) -> dict[Contender, list[Run]]:
        """What each contender did in each round, after one untimed batch; who cannot run goes to `refused`.

        No round begins after `deadline`, except the first.
        """
        runs: dict[Contender, list[Run]] = {}
        for contender in contenders:
            if self._try(contender, batches[:1]):
                runs[contender] = []
        for index in range(rounds):
            if index and time.perf_counter() > deadline:
                break
            self._say(f"round {index + 1} of {rounds}")
            for contender in list(runs)[:: -1 if index % 2 else 1]:
                run = self._try(contender, batches)
                if run is None:
                    del runs[contender]
                else:
                    runs[contender].append(run)
        return runs

    def _try(self, contender: Contender, batches: Sequence[Batch]) -> Run | None:
        started = time.perf_counter()
        try:
            run = self._worker(contender).run(contender, batches)
        except RefusedError as error:
            self.refused[contender] = str(error)
            self._say(f"  {contender}: {error}")
            return None
        self._say(f"  {contender}: {run.num_tokens / run.seconds:.0f} tokens/s; {time.perf_counter() - started:.1f} s")
        return run

    def _worker(self, contender: Contender) -> Worker:
        name = str(contender) if contender.engine == "vllm" else contender.engine
        if name not in self._workers:
            worker = Worker(self._task, self._clock, self._engine_log)
            self._workers[name] = self._stack.enter_context(closing(worker))
        return self._workers[name]


def facts(contender: Contender, batch: int, runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Any]:
    """One row of the result: raw times, and the share of outputs that equal the reference's."""
    pairs = list(zip(runs[0].outputs, reference[0].outputs, strict=True))
    return contender._asdict() | {
        "batch": batch,
        "tokens": runs[0].num_tokens,
        "seconds": [run.seconds for run in runs],
        "tokens_per_second": [run.num_tokens / run.seconds for run in runs],
        "same_text": sum(ours == theirs for ours, theirs in pairs) / len(pairs),
    }
