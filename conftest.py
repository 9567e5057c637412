"""README and docs run as tests: their Python, and what they show of a shell.

A page has a folder of its own and an environment without the plugins of anybody else. A Python block that begins with
`# some/file.py` is also saved there, and the blocks after it can import it. A file under `tests/` is only saved: pytest
runs it.
A `console` block is a transcript: its commands run in that folder, one after the other, must succeed, and must print
what stands below them, where `...` is anything.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from contextlib import chdir
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from scripts.clean_environment import Environment
    from sybil import Example, Sybil


PAGES = ["README.md", "docs/*.md", "docs/*/*.md"]
LONG_PAGES = {  # run in .ci/full only
    "a-drafter-elsewhere.md",
    "better-proposer.md",
    "conformance.md",
    "cost-and-break-even.md",
    "draft-checkpoints.md",
    "record-and-replay.md",
    "test-without-a-gpu.md",
}
SLOW_PAGES = {"first-proposer.md"}  # in .ci/run too
PROMPT = "$ "
FOR_PYTEST = "tests/"
NO_CASES = SimpleNamespace(indices={})  # of a test without parameters
SAVED_AS = re.compile(r"# (\S+\.py)\n")


class Page:
    """Where a page's files are saved and its commands run."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name) / "work"
        self.folder.mkdir()
        self._importable = str(self.folder)
        sys.path.insert(0, self._importable)

    @cached_property
    def environment(self) -> Environment:
        """Made for the first command only."""
        from scripts.clean_environment import Environment

        return Environment.create(Path(self._temporary.name) / "environment", with_checkout=True)

    def save(self, name: str, text: str) -> None:
        """Write a file into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, command: str) -> str:
        """What a command prints on standard output; `cd` counts for those after it."""
        if command.startswith("cd "):
            self.folder = (self.folder / command.removeprefix("cd ")).resolve(strict=True)
            return ""
        return self.environment.run("sh", "-c", command, cwd=self.folder)

    def close(self) -> None:
        """Remove everything."""
        sys.path.remove(self._importable)
        self._temporary.cleanup()


def run_python(example: Example) -> None:
    """A `python` block, saved where it names a file, in the page's folder."""
    from sybil.evaluators.python import PythonEvaluator

    named = SAVED_AS.match(example.parsed)
    if named:
        example.namespace["page"].save(named[1], example.parsed)
    if not named or not named[1].startswith(FOR_PYTEST):
        with chdir(example.namespace["page"].folder):
            PythonEvaluator()(example)


def run_transcript(example: Example) -> None:
    """A `console` block."""
    assert example.parsed.startswith(PROMPT), "a transcript begins with a prompt; what is not run is a `bash` block"
    for part in re.split(rf"^{re.escape(PROMPT)}", example.parsed, flags=re.MULTILINE)[1:]:
        command, expected = split(part)
        printed = example.namespace["page"].run(command)
        assert matches(expected, printed), f"$ {command}\nexpected:\n{expected}\nprinted:\n{printed}"


def split(part: str) -> tuple[str, str]:
    """A command, which goes on after a line that ends with a backslash, and what it is said to print."""
    lines = part.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
    return "\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :])


def matches(expected: str, printed: str) -> bool:
    """Whether the lines are those, however they are spaced; `...` is anything, also several lines."""
    pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*") for word in expected.split())
    return re.search(pattern, printed, flags=re.DOTALL) is not None


def open_page(namespace: dict[str, object]) -> None:
    """Before a page's first example."""
    namespace["page"] = Page()


def close_page(namespace: dict[str, object]) -> None:
    """After a page's last example."""
    namespace["page"].close()


@cache
def pages() -> Sybil:
    """Made for the first page: the checks of an installed kit, in an environment below here, need no Sybil."""
    from sybil import Sybil
    from sybil.parsers.markdown import CodeBlockParser

    parsers = [CodeBlockParser("python", run_python), CodeBlockParser("console", run_transcript)]
    return Sybil(parsers=parsers, patterns=PAGES, setup=open_page, teardown=close_page)


def pytest_configure() -> None:
    """A shell starts jobs in the background with SIGINT ignored. Tests send it, and their processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Blocks of long pages carry the markers that slow tests carry. Of a slow test's cases .ci/run runs the first."""
    if item.path.name in LONG_PAGES:
        item.add_marker("full")
    is_slow = item.path.name in SLOW_PAGES or item.get_closest_marker("slow")
    if is_slow and not item.get_closest_marker("full"):
        item.add_marker("full")
        if not any(getattr(item, "callspec", NO_CASES).indices.values()):
            item.add_marker("ci")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Blocks of the pages."""
    return pages().pytest()(file_path, parent) if file_path.suffix == ".md" else None
