"""A proposer's process that belongs to one engine: started with it, started again, and ended with it."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from specdec.sdk.child_wire import (
    END,
    KEEPER,
    KILL,
    START,
    Ended,
    Order,
    Ready,
    Report,
    as_line,
    read_report,
    socket_of,
)
from specdec.sdk.errors import PluginId, ProposerError, SpecdecError
from specdec.sdk.shared_states import SharedStates
from specdec.sdk.types import TargetInfo
from specdec.sdk.wire import Failed, as_error

from .connection import Connection, LostError
from .drafter import Place

if TYPE_CHECKING:
    from .proposer import IsolationOptions

RETRY_MS = 10
"""Between two looks for the socket of a process that starts."""

LONGEST_DIRECTORY = 80
"""In bytes: a socket's path has 107 at most."""

KILL_SECONDS = 3.0
"""In which a keeper ends a process. One that does not is killed itself, and its process with it."""

GRACE_SECONDS = 10.0
NO_REPORT = "it ended, and so did its keeper"
MOST_REPORT = 2**20


OUT_OF_MEMORY = re.compile("MemoryError|allocate memory|not enough memory|bad_alloc|start new thread")
"""Python's error, C++'s, and torch's, which has no class of its own; and a thread's stack that finds no room."""


class Child(Place):
    """The place of a proposer in a process of its own, behind a keeper that forks it."""

    def __init__(
        self,
        plugin: PluginId,
        target: TargetInfo,
        speculative_config: Mapping[str, Any],
        options: IsolationOptions,
        tokenizer: tuple[str, bool] | None,
        states: SharedStates | None = None,
    ) -> None:
        """`tokenizer`: as in `Order`. `states`: where it finds hidden states. None means that it reads none."""
        self.label = f"the process of {plugin.label}"
        self.num_starts = 0
        self._plugin, self._start_seconds = plugin, options.start_seconds
        self._facts = {
            "target": vars(target) | {"checkpoint_dir": target.checkpoint_dir and str(target.checkpoint_dir)},
            "speculative_config": dict(speculative_config),
            "tokenizer": tokenizer,
            "states": None if states is None else states.descriptor,
            **{name: getattr(options, name) for name in ("memory_mib", "num_threads", "ahead", "torch_compile")},
        }
        self._keeper: _Keeper | None = None
        self._number = 0  # of the keeper's newest process
        self._is_new = False  # nobody was connected to it
        self._started_at = 0.0
        self._reports: list[Report] = []  # of the newest process
        self._ends_by: float | None = None  # seconds; None: it was not told to end

    def begin(self) -> None:
        """Start it, and wait until it listens. Raises what its proposer raised, or ProposerError SD-E335."""
        self._start()
        end = time.monotonic() + self._start_seconds
        while not self._reports and self._keeper is not None and (left := end - time.monotonic()) > 0:
            self._read(left)
        error = self._error()
        if error is not None:
            self._number = 0
            self.close()
            raise error

    def connect(self, most_bytes: int) -> Connection:
        """A new connection to a new process, which may not listen yet. Raises LostError where none can be started."""
        try:
            if not self._is_new:
                self._start()
        except OSError as error:  # no memory for a process, no room for its directory
            raise LostError(f"it cannot be started: {error}") from error
        self._is_new = False
        assert self._keeper is not None, "it was started"
        return Connection(socket_of(self._keeper.directory, self._number), RETRY_MS, most_bytes=most_bytes)

    def has_failed(self) -> bool:
        """Whether the newest process will not answer."""
        self._read(0)
        ended = any(isinstance(each, Ended | Failed) for each in self._reports)
        late = not self._reports and time.monotonic() - self._started_at > self._start_seconds
        return ended or late or self._keeper is None

    def fate(self, seconds: float) -> str | None:
        """How it ended. It is ended for that, if it had not. None: that takes longer than so many seconds."""
        end = time.monotonic() + seconds
        while self._is_ending():
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._read(min(left, KILL_SECONDS))
        self._is_new = False
        limit = self._facts["memory_mib"]
        limited = "" if limit is None else f"; memory_mib: {limit} is its limit"
        return "\n".join(filter(None, (_as_text(each, limited) for each in self._reports))) or NO_REPORT

    def limit_met(self, text: str) -> dict[str, str]:
        """The fact that names the limit on its memory, where this is the text of an error that comes of it."""
        limit = self._facts["memory_mib"]
        return {"limit": f"memory_mib: {limit}"} if limit is not None and OUT_OF_MEMORY.search(text) else {}

    def close(self) -> None:
        """End it, in time to save what it has to. Raises the error of its end."""
        if self._keeper is not None:
            self._keeper.say(END)
            end = time.monotonic() + GRACE_SECONDS + KILL_SECONDS
            while self._keeper is not None and (left := end - time.monotonic()) > 0:
                self._read(left)
            self._drop_keeper()
        failed = [each for each in self._reports if isinstance(each, Failed)]
        if failed and self._number:
            raise as_error(failed[0], self._plugin)

    def _is_ending(self) -> bool:
        """Whether it is still there. It is told to end once, and killed if it does not."""
        self._read(0)
        has_ended = any(isinstance(each, Ended) for each in self._reports)
        if self._keeper is not None and not has_ended:
            if self._ends_by is None:
                self._keeper.say(KILL)
                self._ends_by = time.monotonic() + KILL_SECONDS
            if time.monotonic() < self._ends_by:
                return True
            self._keeper.kill()
            self._drop_keeper()
        self._ends_by = None
        return False

    def _start(self) -> None:
        if self._keeper is None or not self._keeper.is_whole or not self._keeper.say(START):
            self._drop_keeper()
            self._keeper, self._number = _Keeper(self._facts), 0
            self._keeper.say(START)
        self._number += 1
        self.num_starts += 1
        self._reports.clear()
        self._is_new, self._started_at = True, time.monotonic()

    def _read(self, seconds: float) -> None:
        """Take what the keeper says within so many seconds: perhaps the first part of a report only."""
        reports = None if self._keeper is None else self._keeper.read(seconds)
        if reports is None:
            self._drop_keeper()
        else:
            self._reports += [each for each in reports if isinstance(each, Failed) or each.number == self._number]

    def _error(self) -> SpecdecError | None:
        """The error of a start. None: it is ready."""
        failed = [each for each in self._reports if isinstance(each, Failed)]
        if failed:
            failed[0].facts |= self.limit_met(str(as_error(failed[0])))
            return as_error(failed[0], self._plugin)
        if any(isinstance(each, Ready) for each in self._reports):
            return None
        if not self._reports and self._keeper is not None:
            facts = {"because": f"it did not listen within {self._start_seconds:g} s", "stands": self._end()}
        else:
            facts = {"because": self._end()}
        facts["fix"] = "try it without isolation, in a process that may end: specdec check names the call"
        return ProposerError("SD-E335", "the process of a proposer did not start", facts, plugin=self._plugin)

    def _end(self) -> str:
        return self.fate(2 * KILL_SECONDS) or "it does not end"

    def _drop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


class _Keeper:
    """The process that forks. It ends when its pipe is closed: by `close`, by the collector, or with this process."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.directory = _private_directory()
        order = Order(directory=self.directory, import_path=_import_path(), grace_seconds=GRACE_SECONDS, **facts)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[] if order.states is None else [order.states],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders: IO[bytes] = self._process.stdin
        self._said: IO[bytes] = self._process.stdout
        self._poll = select.poll()  # select takes no descriptor beyond 1023
        self._poll.register(self._said, select.POLLIN)
        self._buffer = b""
        self._owner = os.getpid()  # a fork of the engine's process has no part in it
        self._closing = weakref.finalize(self, _end, self._process, self.directory, self._owner)
        self.say(as_line(order))

    def say(self, line: bytes) -> bool:
        """Whether it could be said."""
        if os.getpid() != self._owner:
            return False
        try:
            while line:
                line = line[os.write(self._orders.fileno(), line) :]
        except (BrokenPipeError, ValueError):  # it has gone
            return False
        return True

    def read(self, seconds: float) -> list[Report] | None:
        """What it said within so many seconds, in whole lines. None: it has gone, or said nonsense."""
        if os.getpid() != self._owner:
            return None
        if not self._poll.poll(max(0.0, 1000 * seconds)):
            return []
        data = os.read(self._said.fileno(), 65536)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if not data or len(self._buffer) > MOST_REPORT:
            return None
        try:
            return [read_report(line) for line in lines]
        except msgspec.DecodeError:
            return None

    @property
    def is_whole(self) -> bool:
        """Whether its directory is still there: without it, no process of its could be reached."""
        return Path(self.directory).is_dir()

    def kill(self) -> None:
        """End it at once. Its process ends with it."""
        if os.getpid() == self._owner:
            self._process.kill()

    def close(self) -> None:
        """It is gone when this returns."""
        self._closing()


def _end(process: subprocess.Popen[bytes], directory: str, owner: int) -> None:
    """Without a pipe it ends its process, and itself. One that does not is killed, and its process with it."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(GRACE_SECONDS + KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)


def _import_path() -> list[str]:
    """`sys.path` without what Python skips, as a `Path`, and what no message holds: a name that is not UTF-8."""
    return [each for each in sys.path if isinstance(each, str) and each == each.encode(errors="ignore").decode()]


def _private_directory() -> str:
    """Its owner's alone, with a path that is short enough for sockets in it."""
    directory = tempfile.mkdtemp(prefix="specdec-process-")
    if len(os.fsencode(directory)) <= LONGEST_DIRECTORY:
        return directory
    Path(directory).rmdir()
    return tempfile.mkdtemp(prefix="specdec-process-", dir="/tmp")


def _as_text(report: Report, limited: str) -> str:
    if isinstance(report, Ended):
        running = f", in {report.running}" if report.running else ""
        return f"it ended {report.how}{running}{limited}" + (f"\n{report.stack}" if report.stack else "")
    return str(as_error(report)) if isinstance(report, Failed) else ""
