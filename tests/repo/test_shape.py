"""The shape of the house in numbers: who imports whom, how long a chain is, how much one step touches."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "sdk", "adapters", "testing", "lab", "cli", "plugins")
FILES = {
    ".".join(["specdec", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of(module: str, nodes: list[ast.stmt], *, everywhere: bool) -> set[str]:
    """Modules of ours. everywhere: those within functions and for types only as well."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= (names & FILES.keys()) | ({origin} if names - FILES.keys() else set())
        elif everywhere or not (is_for_types(node) or isinstance(node, ast.FunctionDef)):
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.ExceptHandler)]
            found |= imports_of(module, inner, everywhere=everywhere)
    return found & FILES.keys() - {module}


@cache
def graph(*, everywhere: bool) -> dict[str, set[str]]:
    return {
        module: imports_of(module, ast.parse(path.read_text(encoding="utf-8")).body, everywhere=everywhere)
        for module, path in FILES.items()
    }


@cache
def chain_from(module: str) -> tuple[str, ...]:
    """The longest chain of imports that happen when a module is loaded."""
    longest = max((chain_from(each) for each in sorted(graph(everywhere=False)[module])), key=len, default=())
    return (module, *longest)


def floors() -> list[list[set[str]]]:
    """What import-linter holds: each of its contracts of layers, the top floor first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [[{room.strip() for room in layer.split("|")} for layer in each] for each in layers]


def floor_of(module: str, house: list[set[str]]) -> int | None:
    return next((i for i, rooms in enumerate(house) for room in rooms if f"{module}.".startswith(f"{room}.")), None)


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter(graph(everywhere=True)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_at_most_two_imports_run_up() -> None:
    up = [
        f"{module} -> {other}"
        for house in floors()
        for module, others in graph(everywhere=True).items()
        for other in others
        if None not in (floor_of(module, house), floor_of(other, house))
        and floor_of(module, house) > floor_of(other, house)
    ]
    assert len(up) <= 2, up


@pytest.mark.parametrize("face", ["specdec.core.llm", "specdec.core.host"])
def test_the_longest_chain_of_imports_is_at_most_twelve(face: str) -> None:
    assert len(chain_from(face)) <= 12, " > ".join(chain_from(face))


def test_the_core_has_at_most_four_loose_files() -> None:
    assert len(list((ROOT / "core").glob("*.py"))) <= 4


def test_every_function_may_have_a_complexity_of_at_most_twelve() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "C90" in lint["select"]
    assert lint["mccabe"]["max-complexity"] <= 12
    assert not [path for path in FILES.values() if "noqa: C901" in path.read_text(encoding="utf-8")]


STEPS = """
import json
import sys
from collections import Counter
from pathlib import Path
from specdec import LLM, SamplingParams

root, rooms, ours = Path(sys.argv[1]), set(json.loads(sys.argv[2])), {}

def within(path):
    # Of a file in one of our rooms: its path in the checkout, where an environment may lie too.
    inside = path.is_absolute() and path.resolve().is_relative_to(root)
    relative = path.resolve().relative_to(root) if inside else Path()
    return str(relative) if rooms & set(relative.parts[:1]) else ""

def count(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call":
        if name not in ours:
            ours[name] = within(Path(name))
        calls[ours[name]] += bool(ours[name])

for speculation, num_steps in json.loads(sys.argv[3]):
    calls = Counter()
    engine = LLM(str(root / "assets" / "tiny" / "target"), speculative_config=speculation).engine
    for prompt in ([5, 6, 7, 8], [9, 10, 11]):
        engine.add_request(prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    for _ in range(6):
        engine.step()
    before = engine.metrics.acceptance.num_draft_tokens
    sys.setprofile(count)
    for _ in range(num_steps):
        engine.step()
    sys.setprofile(None)
    drafted = engine.metrics.acceptance.num_draft_tokens - before
    print(json.dumps({"files": sorted(+calls), "calls": calls.total(), "drafted": drafted}))
"""
LONGER = 12
"""Steps among which drafts are verified."""
SPECULATION = [
    (None, 1),
    ({"method": "ngram", "num_speculative_tokens": 3, "proposer_config": {"prompt_lookup_min": 1}}, LONGER),
    ({"method": "suffix", "num_speculative_tokens": 3, "max_nodes": 6}, LONGER),
]
OF_TREES = re.compile(r"tree|path")
"""Their files are named so, in the engine and in `sdk`."""


@cache
@cache
def steps() -> list[dict[str, Any]]:
    """Of plain steps, of chains and of trees, for two requests on the packaged target: calls of our functions, the
    files that they lie in, and how many drafts were verified.
    """
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(ROOT), json.dumps(ROOMS), json.dumps(SPECULATION)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_plain_step_stays_small() -> None:
    plain, _, _ = steps()
    assert len(plain["files"]) <= 20
    assert plain["calls"] <= 250


@pytest.mark.slow
def test_no_code_of_trees_is_on_the_way_of_chains() -> None:
    plain, chains, trees = steps()
    assert chains["drafted"] > 0
    assert trees["drafted"] > 0
    of_trees = [[name for name in each["files"] if OF_TREES.search(name)] for each in (plain, chains, trees)]
    assert of_trees[:2] == [[], []]
    assert len(of_trees[2]) > 4, "the trace would not see it"


def test_modules_that_tests_import_by_name_have_names_of_their_own() -> None:
    """Folders of tests stand on one path, so the second of two modules of a name would never be found."""
    tests = ROOT / "tests"
    folders = {conftest.parent for conftest in tests.rglob("conftest.py")} | {tests / "helpers"}
    helpers = [path.name for folder in folders for path in folder.glob("*.py")]
    named = [name for name in helpers if name != "conftest.py" and not name.startswith("test_")]
    assert len(named) == len(set(named)), sorted(name for name in set(named) if named.count(name) > 1)


def test_tests_that_others_import_have_names_of_their_own() -> None:
    """Run together, the first of two folders would be found for both."""
    files = list((ROOT / "tests").rglob("*.py"))
    said = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    imported = {name for path in files for name in said.findall(path.read_text())}
    assert len(imported) > 5, "the pattern would not see it"
    assert not [name for name in sorted(imported) if sum(path.stem == name for path in files) > 1]


def test_no_test_imports_a_conftest_by_name() -> None:
    """Which of several it would get depends on the order in which tests are collected."""
    said = re.compile(r"^(from|import) conftest\b", re.MULTILINE)
    assert not [path.name for path in (ROOT / "tests").rglob("*.py") if said.search(path.read_text())]
