"""What a worker counts, on vLLM's /metrics: workers write files, and the process that answers reads them.

vLLM carries numbers of its own from its workers to its server, and none of others.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from .wrapping import around

VARIABLE = "SPECDEC_METRICS_DIR"
"""Of the environment: the folder of these files. The first process makes one, and the others inherit it."""

SUFFIX = ".prom"


@dataclass(frozen=True)
class WorkersPage:
    """The file of one worker."""

    file: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> WorkersPage | None:
        """A new one. None: nobody reads any."""
        directory = environment.get(VARIABLE)
        if directory is None or not Path(directory).is_dir():
            return None
        handle, name = tempfile.mkstemp(SUFFIX, f"{os.getpid()}-", directory)
        os.close(handle)
        return cls(Path(name))

    def write(self, published: Callable[[], str]) -> None:
        """Replace the file as a whole. A step may count something new meanwhile."""
        with suppress(RuntimeError, OSError):  # "changed size during iteration", or no room: the next second says it
            new = self.file.with_suffix(".new")
            new.write_text(published())
            new.replace(self.file)

    def remove(self) -> None:
        """The worker shuts down."""
        self.file.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)  # a registry keeps collectors by identity
class Workers:
    """What all workers' files say, as prometheus-client collects it. The label `worker` names the file."""

    directory: Path

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        silent = GaugeMetricFamily(
            "specdec:worker_silent_seconds", "since the worker wrote its file", labels=["worker"]
        )
        for file in sorted(self.directory.glob(f"*{SUFFIX}")):
            with suppress(OSError):  # it shuts down
                self._add(file, families)
                silent.add_metric([file.stem], max(time.time() - file.stat().st_mtime, 0.0))
        yield from families.values()
        if silent.samples:
            yield silent

    def _add(self, file: Path, families: dict[str, Family]) -> None:
        for family in text_string_to_metric_families(file.read_text()):
            known = families.setdefault(family.name, Family(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.samples.append(sample._replace(labels={**sample.labels, "worker": file.stem}))


@cache
def show() -> None:
    """Show the workers on /metrics. Called once, before workers start, in a process that may answer."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = directory = tempfile.mkdtemp(prefix="specdec-metrics-")
        atexit.register(_remove, directory, os.getpid())
    workers = Workers(Path(os.environ[VARIABLE]))
    REGISTRY.register(workers)
    for name in ("vllm.v1.metrics.prometheus", "vllm.entrypoints.serve.instrumentator.metrics"):
        module: Any = sys.modules.get(name)
        if module is not None:  # several servers share one page: they make a registry of their own for it
            module.get_prometheus_registry = around(module.get_prometheus_registry, partial(registry_with, workers))


def registry_with(workers: Workers, made: Callable[[], CollectorRegistry]) -> CollectorRegistry:
    """A registry that is made for a page, with the workers in it. The process's own has them already."""
    registry = made()
    if registry is not REGISTRY:
        registry.register(workers)
    return registry


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits this call
        shutil.rmtree(directory, ignore_errors=True)
