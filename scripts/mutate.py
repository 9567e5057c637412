"""Faults planted in our own code: which tests end which, and what lives.

    python -m scripts.mutate --count 450 --seconds 3000
    python -m scripts.mutate --inside v1 --again
    python -m scripts.mutate --one "Layout.legal: 1 -> 2" --tests tests/rejection/test_trees.py

One warm process collects the tests of scripts/mutate.toml, and runs each once to see which lines it meets and how long
it takes. Then it forks for every fault: the child plants it, and runs the tests that meet its line until one fails, the
fastest of each file first. Processes that a test starts have the fault too. Another child runs the same tests without
the fault: one that fails there too judges nothing from then on. What is found is kept in
benchmarks/results/faults.json. A fault that is judged there is judged again when its function has changed. Ends with 1
where too few are killed of those that are not equivalent.

`--inside v1` or `v2` needs vLLM: tests run its engines, with that model runner, in the warm process and its forks.
`--one` judges all faults whose name contains the text, and keeps nothing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from . import inside_vllm
from .faults import ROOT, Fault, drawn, faults_of
from .other_processes import adding_to, note_there, noted, plant_there, unwatch, watch

TABLE = ROOT / "benchmarks/results/faults.json"
SETTINGS = tomllib.loads((ROOT / "scripts/mutate.toml").read_text())
SHARE_KILLED = 0.95
SETTLED = {"killed", "equivalent"}
QUICK = 0.3  # seconds of a test that runs before others: most often of one part alone
SHARE_OF_A_TEST = 0.4  # of the time of one fault; a test that takes longer judges none


class Laboratory:
    """A pytest plugin that runs the collected tests its own way."""

    def __init__(self, faults: list[Fault], args: argparse.Namespace, notes: Path) -> None:
        self.faults, self.args, self.notes = faults, args, notes
        self.failed: list[str] = []
        self.met: dict[str, dict[str, Any]] = _read_notes(notes) if notes.exists() else {}
        self.out = os.fdopen(os.dup(1), "w", buffering=1)

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("faults", database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("faults")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is marked `full`, and slow tests but for those of the files that are named."""
        items[:] = [each for each in items if self.args.inside or _is_run(each)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _silence()
        items, started = list(session.items), time.monotonic()
        for item in items:
            if item.nodeid not in self.met and time.monotonic() - started < self.args.look:
                self._look_at(item)
                if len(self.met) % 100 == 0 or item is items[-1]:
                    _write_notes(self.notes, self.met)
        print(f"{len(items)} tests, {len(self.met)} of them looked at", file=self.out)
        self._warm_up(items)
        table, started = read_table(), time.monotonic()
        for fault in sorted(self.faults, key=lambda each: each.name in table["faults"]):  # new ones first
            if time.monotonic() - started > self.args.seconds:
                break
            known = table["faults"].get(fault.name, {})
            if self.args.one:
                print(f"{self._verdict(fault, items)}  {fault.name}", file=self.out)
            elif known.get("source") != fault.source or (self.args.again and known["verdict"] not in SETTLED):
                self._judge(fault, items, table)
        return True

    def _warm_up(self, items: list[pytest.Item]) -> None:
        """Run the fastest test of each file: what a session makes once is then made of sound code."""
        sound = [each for each in items if self.met.get(each.nodeid, {}).get("sound")]
        sound.sort(key=lambda each: self.met[each.nodeid]["seconds"], reverse=True)
        for item in {each.path: each for each in sound}.values():
            _run(item)

    def _look_at(self, item: pytest.Item) -> None:
        lines = self.notes.with_suffix(".lines")
        note_there(lines)
        self.failed.clear()
        started = sum(os.times()[:4])
        watch(adding_to(str(lines)))
        _run(item)
        unwatch()
        self.met[item.nodeid] = {
            "seconds": round(sum(os.times()[:4]) - started, 3),
            "sound": not self.failed,
            "lines": {file: sorted(each) for file, each in noted(lines).items()},
        }

    def _judge(self, fault: Fault, items: list[pytest.Item], table: dict[str, Any]) -> None:
        reason = SETTINGS["equivalent"].get(fault.name)
        verdict = {"verdict": "equivalent", "because": reason} if reason else self._verdict(fault, items)
        if verdict["verdict"] == "not reached" and fault.name in table["faults"]:
            return
        row = {"file": fault.file, "line": fault.line, "source": fault.source, "commit": table["commit"]}
        table["faults"][fault.name] = {**row, **verdict}
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        print(f"{verdict}  {fault.name}", file=self.out)

    def _verdict(self, fault: Fault, items: list[pytest.Item]) -> dict[str, Any]:
        while chosen := self._tests_of(fault, items):
            verdict = _in_a_child(partial(self._failing, chosen, fault), self.args.each)
            ran = [item.nodeid for item in chosen]
            if verdict.get("by") not in ran:
                return verdict
            again = chosen[: ran.index(verdict["by"]) + 1]
            control = _in_a_child(partial(self._failing, again), self.args.each)
            if control["verdict"] == "survived":
                return verdict
            self.met[control["by"]]["sound"] = False
        return {"verdict": "not reached"}

    def _tests_of(self, fault: Fault, items: list[pytest.Item]) -> list[pytest.Item]:
        """Those that meet its line, or else its function, as many as there is time for.

        Quick ones come first, then those whose names have the most words of the fault's, of these the fastest of each
        file, the second, ...
        """
        told = _words(fault.name)

        def meeting(first: int, last: int) -> list[pytest.Item]:
            known = [(self.met.get(item.nodeid), item) for item in items]
            found: list[tuple[float, int]] = [
                (note["seconds"], index)
                for index, (note, _) in enumerate(known)
                if note
                and note["sound"]
                and note["seconds"] < SHARE_OF_A_TEST * self.args.each
                and any(first <= line <= last for line in note["lines"].get(fault.file, ()))
            ]
            turns: Counter[Path] = Counter()
            order: list[tuple[bool, int, int, float, int]] = []
            spent = 0.0
            for seconds, index in sorted(found):
                spent += seconds
                is_slow = seconds > QUICK or spent > self.args.each / 4
                num_shared = len(told & _words(items[index].nodeid)) if is_slow else 0
                order.append((is_slow, -num_shared, turns[items[index].path], seconds, index))
                turns[items[index].path] += 1
            chosen, spent = [], 0.0
            for *_, seconds, index in sorted(order):
                spent += seconds
                if chosen and spent > self.args.each:
                    break
                chosen.append(items[index])
            return chosen

        return meeting(fault.line, fault.line) or meeting(fault.first_line + 1, fault.last_line)

    def _failing(self, chosen: list[pytest.Item], fault: Fault | None = None) -> dict[str, Any]:
        _forget_answers()
        if fault:
            fault.plant()
            plant_there(fault)
        self.failed.clear()
        for item in chosen:
            _run(item)
            if self.failed:
                return {"verdict": "killed", "by": self.failed[0]}
        return {"verdict": "survived", "tests": len(chosen)}


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z]{4,}", name.lower()))


def _is_run(item: pytest.Item) -> bool:
    is_slow = item.get_closest_marker("slow") is not None
    return item.get_closest_marker("full") is None or (is_slow and item.path.name in SETTINGS["slow"])


def _run(item: pytest.Item) -> None:
    """What the session made stays; all else is taken down, whatever comes next."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=item.session)


def _write_notes(notes: Path, met: dict[str, Any]) -> None:
    """With the text of each file, since lines move."""
    files = {file for note in met.values() for file in note["lines"]}
    texts = {file: (ROOT / file).read_text() for file in files if (ROOT / file).exists()}
    notes.write_text(json.dumps({"met": met, "texts": texts}))


def _read_notes(notes: Path) -> dict[str, Any]:
    """Which tests met which of the lines that are there now."""
    read = json.loads(notes.read_text())
    moved: dict[str, dict[int, int]] = {}
    for file, text in read["texts"].items():
        now = (ROOT / file).read_text().splitlines() if (ROOT / file).exists() else []
        blocks = SequenceMatcher(None, text.splitlines(), now, autojunk=False).get_matching_blocks()
        moved[file] = {a + at + 1: b + at + 1 for a, b, size in blocks for at in range(size)}
    for note in read["met"].values():
        lines = {file: moved.get(file, {}) for file in note["lines"]}
        note["lines"] = {file: [new[at] for at in note["lines"][file] if at in new] for file, new in lines.items()}
    return read["met"]


def _in_a_child(work: Any, seconds: float) -> dict[str, Any]:
    """What it returns in a fork of this process, which has so much time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgrp()  # a fault that ends its whole group ends nobody else
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * seconds), int(2 * seconds)))
        signal.alarm(int(4 * seconds))
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


def summary(faults: list[Fault], table: dict[str, Any]) -> dict[str, Any]:
    """How many of the drawn faults had which verdict, and what was killed of those that are not equivalent.

    What was judged before its function changed is not judged.
    """
    known = {(name, row["source"]): row["verdict"] for name, row in table["faults"].items()}
    counts = Counter(known.get((fault.name, fault.source), "not judged") for fault in faults)
    others = counts.total() - counts["equivalent"]
    return {
        **dict(sorted(counts.items())),
        "drawn": counts.total(),
        "share_killed": round(counts["killed"] / others, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", default=SETTINGS["areas"])
    parser.add_argument("--only", default="", help="faults of files whose path contains it")
    parser.add_argument("--tests", nargs="*", help="test files in place of those of mutate.toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=450, help="the first so many that the seed draws")
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--look", type=float, default=3000, help="for the tests without a fault")
    parser.add_argument("--each", type=float, default=60, help="of the tests of one fault, as they were looked at")
    parser.add_argument("-k", default="", help="tests, as pytest's -k")
    parser.add_argument("--again", action="store_true", help="judge what was not killed once more")
    parser.add_argument(
        "--one", default="", help="of all faults those whose name contains it; the table stays as it is"
    )
    parser.add_argument("--inside", choices=["v1", "v2"], help="tests of vLLM, with this model runner")
    parser.add_argument("--notes", type=Path, default=None, help="where the lines that tests meet are kept")
    args = parser.parse_args()
    if args.inside:
        inside_vllm.enter(args.inside)
    files = [path.relative_to(ROOT).as_posix() for area in args.areas for path in (ROOT / area).rglob("*.py")]
    files = [file for file in files if args.only in file]
    faults = drawn(files, args.seed)[: args.count]
    if args.one:
        judged = [fault for file in files for fault in faults_of(file) if args.one in fault.name]
    else:
        judged = [fault for fault in faults if not args.inside or fault.file.startswith("adapters/vllm_")]
    notes = args.notes or ROOT / "build" / f"mutate{args.inside or ''}.json"
    notes.parent.mkdir(exist_ok=True)
    random.seed(args.seed)
    options = ["-p", "no:cacheprovider", "-n", "0", "-q", "--capture=no", "-m", "not gpu", "-k", args.k]
    options += ["-W", "ignore"] if args.inside else []
    patterns = SETTINGS[f"tests_inside_{args.inside}" if args.inside else "tests"]
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.name not in SETTINGS["but"]}
    tests = args.tests or sorted(map(str, found))
    laboratory = Laboratory(judged, args, notes)
    status = pytest.main([*options, *tests], plugins=[laboratory])
    if args.one:
        return status
    table = read_table()
    table["faults"] = {fault.name: table["faults"][fault.name] for fault in faults if fault.name in table["faults"]}
    table["summary"] = summary(faults, table)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["summary"]), file=laboratory.out)
    return status or int(table["summary"]["share_killed"] < SHARE_KILLED)


if __name__ == "__main__":
    sys.exit(main())
