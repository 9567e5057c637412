"""The process between an engine and its proposer's process: it has the libraries loaded, and forks.

So a proposer that ended is there again as soon as it is constructed. The keeper runs nothing of a plugin. It ends with
the engine, however that ends, and with it the process that it forked.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, Any, NoReturn

from specdec.sdk.child_wire import END, KILL, START, Ended, Order, as_line, read_order
from specdec.sdk.exit_status import how_it_ended

from .child import Inherited, Notes, run

TICK_S = 1.0
"""Between two looks at whether the engine is still there, beside its pipe: a fork of the engine may hold that open."""

LOOK_S = 0.005  # between two looks at what a process has written
STACK_S = 0.25
"""In which a process writes where it stands."""

MOST_STACK = 4000


class Keeper:
    """Forks one process at a time, and reports how each ended."""

    def __init__(self, order: Order, tokenizer: Any, orders: int, reports: int) -> None:
        """orders, reports: file descriptors of the engine's."""
        self._order, self._tokenizer = order, tokenizer
        self._orders, self._reports = orders, reports
        self._engine = os.getppid()
        self._number = 0
        self._child: int | None = None
        self._notes = Notes()
        self._stacks: IO[bytes] = tempfile.TemporaryFile(dir=order.directory)  # noqa: SIM115 - to the end
        self._woken, waking = os.pipe()
        for each in (self._woken, waking):
            os.set_blocking(each, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking)

    def keep(self) -> None:
        """Keep the process until the engine says stop, or has ended itself."""
        buffer = b""
        while os.getppid() == self._engine:
            ready, *_ = select.select([self._orders, self._woken], [], [], TICK_S)
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            if self._orders in ready:
                said = os.read(self._orders, 4096)
                *lines, buffer = (buffer + said).splitlines(keepends=True) or [b""]
                if buffer.endswith(b"\n"):
                    lines, buffer = [*lines, buffer], b""
                if not said or END in lines:
                    return
                for line in lines:
                    self._obey(line)

    def close(self) -> None:
        """End the process, in time to save its state."""
        if self._child is not None:
            os.kill(self._child, signal.SIGTERM)
            self._await_end(self._order.grace_seconds)
            self._kill()

    def _obey(self, line: bytes) -> None:
        if line == START:
            self._kill()
            self._fork()
        elif line == KILL:
            self._kill()

    def _fork(self) -> None:
        self._number += 1
        self._notes.running("")
        self._stacks.truncate(0)
        self._stacks.seek(0)
        child = os.fork()
        if child == 0:
            self._be_child()
        self._child = child

    def _be_child(self) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            inherited = Inherited(self._number, self._orders, self._reports, self._stacks, self._notes)
            run(self._order, self._tokenizer, inherited)
            status = 0
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(status)

    def _kill(self) -> None:
        """Kill the process, after it has written its stack. It is gone when this returns."""
        if self._child is None:
            return
        os.kill(self._child, signal.SIGUSR1)
        end, before, size = time.monotonic() + STACK_S, -1, 0
        while time.monotonic() < end and not 0 < size == before:
            time.sleep(LOOK_S)
            before, size = size, os.fstat(self._stacks.fileno()).st_size
            self._reap()
            if self._child is None:
                return
        os.kill(self._child, signal.SIGKILL)
        self._reap(os.WEXITED)

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._child is not None and time.monotonic() < end and os.getppid() == self._engine:
            select.select([self._woken], [], [], min(TICK_S, max(0.0, end - time.monotonic())))
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()

    def _reap(self, options: int = os.WNOHANG) -> None:
        if self._child is None:
            return
        child, status = os.waitpid(self._child, options & os.WNOHANG)
        if child == 0:
            return
        with suppress(ProcessLookupError, PermissionError):  # mostly there are none
            os.killpg(self._child, signal.SIGKILL)  # its helpers
        self._child = None
        code = os.waitstatus_to_exitcode(status)
        how = how_it_ended(code)
        self._stacks.seek(0)
        stack = self._stacks.read(MOST_STACK).decode(errors="replace").strip()
        with suppress(BrokenPipeError):
            os.write(self._reports, as_line(Ended(self._number, how, self._notes.what_runs, stack)))


def main() -> None:
    """Read the order, and keep."""
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal and a supervisor tell every process; the engine decides
        signal.signal(each, signal.SIG_IGN)
    reports = os.dup(1)
    os.dup2(2, 1)  # what is printed is no report
    os.set_inheritable(reports, False)
    with open(0, "rb", buffering=0, closefd=False) as unread:  # what follows the first line stays for the keeper
        order = read_order(unread.readline())
    sys.path[:] = order.import_path
    keeper = Keeper(order, _tokenizer(order), 0, reports)
    try:
        keeper.keep()
    finally:
        keeper.close()
        shutil.rmtree(order.directory, ignore_errors=True)


def _tokenizer(order: Order) -> Any:
    if order.tokenizer is None:
        return None
    from specdec.core.host import load_tokenizer

    name, trusts = order.tokenizer
    return load_tokenizer(None, name, trust_remote_code=trusts)


if __name__ == "__main__":
    main()
