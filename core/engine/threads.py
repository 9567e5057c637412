"""How many CPU threads an engine computes with: PyTorch's own number is too many for a small model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger("specdec")

SMALL_MODEL = 50_000_000
"""Weights below which one thread is the default: waking others costs more than they compute."""

VARIABLES = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


@dataclass(frozen=True)
class Threads:
    """An engine's number, in force while it compiles and steps; elsewhere the process keeps its own."""

    chosen: int | None  # None: whatever PyTorch has
    replaced: int | None  # PyTorch's number that gives way; None: any

    @classmethod
    def choose(cls, asked: int | None, model: Any) -> Threads:
        """Take the number asked for. Else, on a CPU, a small model gets one, unless the user has set PyTorch's."""
        if asked is not None:
            return cls(asked, None)
        found = torch.get_num_threads()
        size = sum(each.numel() for each in (*model.parameters(), *model.buffers()))  # packed weights are buffers
        if size >= SMALL_MODEL or found == 1 or _is_the_users(found):
            return cls(None, None)
        otherwise = f"num_threads, {VARIABLES[0]} or torch.set_num_threads choose otherwise"
        logger.info("computing with 1 CPU thread, not PyTorch's %d: the model is small; %s", found, otherwise)
        return cls(1, found)

    @property
    def count(self) -> int:
        """Threads of a step."""
        found = torch.get_num_threads()
        return found if self.chosen is None or self.replaced not in (None, found) else self.chosen

    @contextmanager
    def used(self) -> Iterator[None]:
        """Give PyTorch the engine's number of threads inside, and afterwards the number from before."""
        before, count = torch.get_num_threads(), self.count
        if count == before:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _is_the_users(found: int) -> bool:
    """Whether this number of threads is the user's: PyTorch by itself takes every processor, or one thread per core."""
    processors = {os.cpu_count() or 1}
    if sys.platform == "linux":
        processors.add(len(os.sched_getaffinity(0)))
    return any(map(os.environ.get, VARIABLES)) or found not in processors | {each // 2 for each in processors}
