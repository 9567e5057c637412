"""Figures of a proposer's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from ..config import Extension


class MetricsMethods(Protocol):
    """The method of a proposer that asks for `Metrics`."""

    def metrics(self) -> Mapping[str, float]:
        """Figures of the proposer's own, as they are now. Called between steps, and never beside another call: on
        the thread of the steps while one runs, else on the reader's.

        A reader that asks during a step sees the last answer.
        Names are lower-case letters, digits and underscores, and begin with a letter. `LLM.get_metrics` shows each as
        `specdec:proposer_NAME_` and its name, where NAME is the proposer's.
        """
        ...


class Metrics(Extension):
    """Figures of the proposer's own are published: `metrics` is called."""

    name: ClassVar[str] = "metrics"
    version: ClassVar[int] = 1
    methods: ClassVar[type | None] = MetricsMethods
