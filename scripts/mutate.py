"""Faults planted in our own code: which tests end which, and what lives.

    python -m scripts.mutate core/cache core/runner --count 100 --seconds 600

One warm process collects an area's tests, and runs each once to see which lines it meets and how long it takes. Then
it forks for every fault: the child plants it, and runs the tests that meet its line, the fastest first, until one
fails. What is found is kept in benchmarks/results/faults.json. A fault that is judged there is not judged again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from .faults import ROOT, Fault, _source_of, drawn

TABLE = ROOT / "benchmarks/results/faults.json"
TESTS: dict[str, list[str]] = tomllib.loads((ROOT / "scripts/mutate.toml").read_text())["tests"]
SECONDS_OF_A_TEST = 10.0  # of processor time; a test that takes longer judges no fault
SECONDS_OF_A_FAULT = 5.0  # of the sound tests that judge it


class Laboratory:
    """A pytest plugin that runs the collected tests its own way."""

    def __init__(self, faults: list[Fault], args: argparse.Namespace, notes: Path) -> None:
        self.faults, self.args, self.notes = faults, args, notes
        self.failed: list[str] = []
        self.met: dict[str, dict[str, Any]] = json.loads(notes.read_text()) if notes.exists() else {}
        self.out = os.fdopen(os.dup(1), "w", buffering=1)

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("faults", database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("faults")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _silence()
        items, started = list(session.items), time.monotonic()
        for item in items:
            if item.nodeid not in self.met and time.monotonic() - started < self.args.look:
                self._look_at(item, items[-1])
        self.notes.write_text(json.dumps(self.met))
        print(f"{len(items)} tests, {len(self.met)} of them looked at", file=self.out)
        table = read_table()
        for fault in self.faults[: self.args.count]:
            if time.monotonic() - started > self.args.seconds:
                break
            if not any(fault.file in note["lines"] for note in self.met.values()):
                continue
            known = table["faults"].get(fault.name, {}).get("verdict")
            if known is None or (self.args.again and known in {"survived", "not reached"}):
                self._judge(fault, items, table)
        return True

    def _look_at(self, item: pytest.Item, last: pytest.Item) -> None:
        lines: dict[str, set[int]] = defaultdict(set)
        self.failed.clear()
        started = time.process_time()
        with _watched(lines):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=last if item is not last else None)
        self.met[item.nodeid] = {
            "seconds": round(time.process_time() - started, 3),
            "sound": not self.failed,
            "lines": {file: sorted(each) for file, each in lines.items()},
        }

    def _judge(self, fault: Fault, items: list[pytest.Item], table: dict[str, Any]) -> None:
        chosen = self._tests_of(fault, items)
        verdict = {"verdict": "not reached"} if not chosen else _in_a_child(lambda: self._run(fault, chosen))
        row = {"file": fault.file, "line": fault.line, "function": fault.function, "before": fault.before}
        table["faults"][fault.name] = {**row, "after": fault.after, "commit": table["commit"], **verdict}
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        print(f"{verdict}  {fault.name}", file=self.out)

    def _tests_of(self, fault: Fault, items: list[pytest.Item]) -> list[pytest.Item]:
        """Those that meet its line, or else its function; the fastest first."""

        def meeting(first: int, last: int) -> list[pytest.Item]:
            known = [(self.met.get(item.nodeid), item) for item in items]
            found = [
                (note["seconds"], index)
                for index, (note, _) in enumerate(known)
                if note
                and note["sound"]
                and note["seconds"] < SECONDS_OF_A_TEST
                and any(first <= line <= last for line in note["lines"].get(fault.file, ()))
            ]
            chosen, spent = [], 0.0
            for seconds, index in sorted(found):
                spent += seconds
                if chosen and spent > SECONDS_OF_A_FAULT:
                    break
                chosen.append(items[index])
            return chosen

        return meeting(fault.line, fault.line) or meeting(fault.first_line + 1, fault.last_line)

    def _run(self, fault: Fault, chosen: list[pytest.Item]) -> dict[str, Any]:
        _forget_answers()
        if not fault.plant():
            return {"verdict": "not reached"}
        self.failed.clear()
        for item in chosen:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=item)
            if self.failed:
                return {"verdict": "killed", "by": self.failed[0]}
        return {"verdict": "survived", "tests": len(chosen)}


class _watched:
    """Notes which lines of our code are run."""

    def __init__(self, lines: dict[str, set[int]]) -> None:
        self.lines = lines

    def __enter__(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        file = _source_of(frame.f_code)
        if not file.startswith(("core/", "adapters/")):
            return None
        lines = self.lines[file]
        lines.add(frame.f_lineno)

        def line(frame: FrameType, event: str, arg: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


def _in_a_child(work: Any) -> dict[str, Any]:
    """What it returns in a fork of this process, which has so much time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (int(4 * SECONDS_OF_A_FAULT), int(4 * SECONDS_OF_A_FAULT)))
        signal.alarm(int(40 * SECONDS_OF_A_FAULT))
        found: dict[str, Any] = {"verdict": "killed", "by": "the end of the process"}
        try:
            found = work()
        except Exception as error:
            found = {"verdict": "not planted", "because": repr(error)}
        finally:
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"verdict": "killed", "by": "the time limit"}


def _forget_answers() -> None:
    """What our functions remember of the time before the fault."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and str(each.__module__).startswith("specdec."):
            each.cache_clear()


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def read_table() -> dict[str, Any]:
    """What has been judged so far."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"seed": 0, "faults": {}}
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {**table, "commit": said.stdout.strip()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="+", choices=TESTS)
    parser.add_argument("--only", default="", help="faults of files whose path contains it")
    parser.add_argument("--tests", nargs="*", help="test files in place of the area's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="the first so many that the seed draws")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--look", type=float, default=300, help="of them, for the tests without a fault")
    parser.add_argument("-k", default="", help="tests, as pytest's -k")
    parser.add_argument("--again", action="store_true", help="judge what survived once more")
    parser.add_argument("--notes", type=Path, default=None, help="where the lines that tests meet are kept")
    args = parser.parse_args()
    files = [path.relative_to(ROOT).as_posix() for area in args.areas for path in (ROOT / area).rglob("*.py")]
    faults = drawn([file for file in files if args.only in file], args.seed)
    notes = args.notes or ROOT / "build" / "mutate.json"
    notes.parent.mkdir(exist_ok=True)
    random.seed(args.seed)
    options = ["-p", "no:cacheprovider", "-n", "0", "-q", "--capture=no", "-m", "not full and not gpu", "-k", args.k]
    tests = args.tests or sorted({file for area in args.areas for file in TESTS[area]})
    return pytest.main([*options, *tests], plugins=[Laboratory(faults, args, notes)])


if __name__ == "__main__":
    sys.exit(main())
