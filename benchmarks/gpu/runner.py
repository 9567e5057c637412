"""Runs stages, each in a process of its own: none can lose what another found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ROOT
from .figures import write
from .page import page_of
from .stages import Stage

ERROR = re.compile(r"\S*(Error|Exception)\b")
PATIENCE = 4  # a rehearsal's: its machine may be small and busy
DONE, FAILED, OVER = "done", "failed", "over its limit"


@dataclass(frozen=True)
class Course:
    """A run over stages that any number of commands continue."""

    stages: Sequence[Stage]
    output: Path
    models: Path
    smoke: bool = False

    def run(self, seconds: float, only: Sequence[str] = ()) -> list[Stage]:
        """Run the stages that have no record, each while its limit fits in; or `only` these, again.

        Returns those that are left.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        stop = time.monotonic() + seconds
        fresh = [each for each in self.stages if self.record(each) is None]
        waiting = [each for each in self.stages if each.name in only] if only else fresh
        left = []
        for stage in waiting:
            if time.monotonic() + self.limit(stage) > stop:
                left.append(stage)
                continue
            print(f"== {stage.name} (at most {self.limit(stage):g} s)", flush=True)
            record = self._run(stage)
            write(self._path(stage, "json"), record)
            (self.output / "page.md").write_text(self.page(), encoding="utf-8")
            print(f"   {record['status']} after {record['seconds']} s {record['because']}".rstrip(), flush=True)
        return left

    def record(self, stage: Stage) -> dict[str, Any] | None:
        """What is known of a stage. None: it has not run to an end.

        Raises SystemExit where one of both is a rehearsal: neither may stand for the other or overwrite it.
        """
        path = self._path(stage, "json")
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if record and record["smoke"] != self.smoke:
            kinds = "a measurement", "a rehearsal"
            raise SystemExit(f"{path} is of {kinds[record['smoke']]}: {kinds[self.smoke]} needs another --output")
        return record

    def page(self) -> str:
        """All that was found, beside the goals."""
        return page_of({stage.name: self.record(stage) for stage in self.stages}, smoke=self.smoke)

    def limit(self, stage: Stage) -> float:
        """Seconds that a stage may take here."""
        return stage.limit * (PATIENCE if self.smoke else 1)

    def _path(self, stage: Stage, ending: str) -> Path:
        return self.output / f"{stage.name}.{ending}"

    def _run(self, stage: Stage) -> dict[str, Any]:
        figures, log = self._path(stage, "figures.json"), self._path(stage, "log")
        figures.unlink(missing_ok=True)
        command = stage.command(figures, self.models, smoke=self.smoke)
        started = time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            status = _ended(command, file, self.limit(stage))
        return {
            "stage": stage.name,
            "smoke": self.smoke,
            "status": status,
            "seconds": round(time.monotonic() - started, 1),
            "because": _last_error(log) if status == FAILED else "",
            "figures": json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {},
        }


def _last_error(log: Path) -> str:
    """The last line that names one; else the last line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if ERROR.match(line)]
    return (named or lines or ["nothing was printed"])[-1][:300]


def _ended(command: list[str], log: Any, limit: float) -> str:
    """How a process ended. One that takes too long is killed with all that it started."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        return DONE if process.wait(limit) == 0 else FAILED
    except subprocess.TimeoutExpired:
        return OVER
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
