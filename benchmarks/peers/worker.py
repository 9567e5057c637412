"""A process of its own for every engine: none disturbs another, one that fails takes nobody along, idle ones sleep."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from .contender import Batch, Contender, Generate, Task

MODULES = {"ours": "ours", "transformers": "with_transformers", "vllm": "with_vllm"}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class RefusedError(Exception):
    """A contender that cannot run here, in one line."""


@dataclass(frozen=True)
class Run:
    """What one contender did with some batches, one after the other."""

    seconds: float
    outputs: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


class Worker:
    """Runs contenders in another process, one call at a time."""

    def __init__(self, task: Task, clock: str, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, task, clock, log), daemon=True)
        os.environ["OMP_NUM_THREADS"] = str(task.num_threads)  # read when the process loads its libraries
        self._process.start()
        theirs.close()

    def run(self, contender: Contender, batches: Sequence[Batch]) -> Run:
        """The batches in turn, after the first one untimed; the first call also builds the contender.

        Raises RefusedError.
        """
        try:
            self._connection.send((contender, batches))
            answer = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(timeout=10)
            raise RefusedError(f"its process ended with exit code {self._process.exitcode}") from error
        if isinstance(answer, str):
            raise RefusedError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()  # it has nothing to put in order, and some engines take their time
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, task: Task, clock: str, log: Path) -> None:
    with log.open("a") as file:  # engines print much, some of it from C++
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch
    import transformers

    torch.set_num_threads(task.num_threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    @cache
    def built(contender: Contender) -> Generate | str:  # or why not
        module = importlib.import_module(f"{__package__}.{MODULES[contender.engine]}")
        try:
            return module.build(contender, task)
        except Exception as error:
            return _in_a_line(error)

    while True:
        try:
            contender, batches = connection.recv()
        except EOFError:
            return
        generate = built(contender)
        connection.send(generate if isinstance(generate, str) else _timed(generate, batches, CLOCKS[clock]))


def _timed(generate: Generate, batches: Sequence[Batch], clock: Callable[[], float]) -> Run | str:
    try:
        generate(batches[0])  # while others ran, its memory may have left the caches, and the machine
        started = clock()
        outputs = [output for batch in batches for output in generate(batch)]
    except Exception as error:
        return _in_a_line(error)
    return Run(clock() - started, outputs)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
