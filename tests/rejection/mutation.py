"""Breaking the sampler on purpose: copies of its source with one edit, imported beside the real one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import specdec.core.kernels
import specdec.core.rejection

TREES = {"kernels": specdec.core.kernels, "rejection": specdec.core.rejection}
OF_OTHERS = ("kernels/compiled.py", "kernels/cpu/layers.py")


@dataclass(frozen=True)
class Mutant:
    """One edit. `before` must occur exactly once in the file, so that no mutant goes stale unnoticed."""

    name: str
    problem: str  # the fixture that must show it
    file: str  # relative to core/, such as rejection/ratio.py
    before: str
    after: str


Edit = Callable[[str, str], str]  # (path relative to core/, text) -> text


def mutated(mutant: Mutant, folder: Path) -> AbstractContextManager[ModuleType]:
    """The rejection package with the mutant's edit, importable while the context lasts."""
    return copied(f"mutant_{mutant.name}", lambda path, text: _edited(path, text, mutant), folder)


@contextmanager
def copied(package: str, edit: Edit, folder: Path) -> Iterator[ModuleType]:
    """A copy of the rejection package with every file edited, importable while the context lasts."""
    for tree, module in TREES.items():
        source = Path(str(module.__file__)).parent
        for file in source.rglob("*.py"):
            path = f"{tree}/{file.relative_to(source).as_posix()}"
            if path not in OF_OTHERS:
                copy = folder / package / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(edit(path, file.read_text()))
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(f"{package}.rejection")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def _edited(path: str, text: str, mutant: Mutant) -> str:
    if path != mutant.file:
        return text
    count = text.count(mutant.before)
    assert count == 1, f"mutant {mutant.name}: {mutant.before!r} occurs {count} times in {path}, expected once"
    return text.replace(mutant.before, mutant.after)
