"""What is done for a fault in the processes that tests start: it is planted there too, and lines they run are noted.

Python reads `started/sitecustomize.py` when such a process begins. What it does is told in the environment.
"""

from __future__ import annotations

import base64
import marshal
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .faults import ROOT, Fault, source_of

PLANTED, NOTED = "SPECDEC_FAULT_PLANTED", "SPECDEC_LINES_NOTED"
Note = Callable[[str, int], None]


def plant_there(fault: Fault) -> None:
    """Processes that are started from now on have it."""
    code = base64.b64encode(marshal.dumps(fault.module_code())).decode()
    _tell(PLANTED, f"{fault.file}:{code}")


def note_there(file: Path) -> None:
    """Processes that are started or forked from now on add to a file which lines they run."""
    file.write_text("")
    _tell(NOTED, str(file))


def noted(file: Path) -> dict[str, set[int]]:
    """The lines by file, as they were noted."""
    lines: dict[str, set[int]] = defaultdict(set)
    for each in file.read_text().splitlines():
        name, _, line = each.rpartition(":")
        lines[name].add(int(line))
    return lines


def _tell(name: str, text: str) -> None:
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    started = str(Path(__file__).parent / "started")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([started, *others]))
    os.environ[name] = text


def begin() -> None:
    """Do in this process what the one that started it was told."""
    file, _, code = os.environ.get(PLANTED, "").partition(":")
    if file:
        _load_from(ROOT / file, marshal.loads(base64.b64decode(code)))
    if NOTED in os.environ:
        watch(adding_to(os.environ[NOTED]))


def _load_from(file: Path, code: CodeType) -> None:
    sound = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if Path(self.path).resolve() == file else sound(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def adding_to(file: str) -> Note:
    """Adds each line once to a file that other processes add to as well."""
    out = os.open(file, os.O_WRONLY | os.O_APPEND)
    known: set[tuple[str, int]] = set()

    def note(name: str, line: int) -> None:
        if (name, line) not in known:
            known.add((name, line))
            os.write(out, f"{name}:{line}\n".encode())

    return note


def watch(note: Note) -> None:
    """Have every line of ours noted that this process runs."""

    def call(frame: FrameType, event: str, arg: object) -> Any:
        file = source_of(frame.f_code.co_filename)
        if not file.startswith(("core/", "adapters/")):
            return None
        note(file, frame.f_lineno)

        def line(frame: FrameType, event: str, arg: object) -> Any:
            note(file, frame.f_lineno)
            return line

        return line

    threading.settrace(call)
    sys.settrace(call)


def unwatch() -> None:
    """Note no more, here and in processes that are started from now on."""
    os.environ.pop(NOTED, None)
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
