"""A command in a child process: exit status 0 counts only where the child said that the command is over.

`os._exit(0)` in a plugin would end a command as if it had succeeded. The parent is forked from before anything is
imported, does nothing but wait, and imports nothing of ours unless it has a fault to report.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIZE = 4096
LARGEST = 254  # exit status that can be noted
ENDED_EARLY = 1  # exit status where the child's would be 0
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP")
STACKS = "SIGUSR1"  # asks the child for the stack of every thread
STACKS_S = 0.5  # within which it writes them
PR_SET_PDEATHSIG = 1


class Notes:
    """What a child leaves for its parent, however it ends: a page of memory that both have."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, SIZE)

    def running(self, text: str) -> None:
        """Note what runs now."""
        noted = text.encode()[: SIZE - 2] + b"\0"
        self._page[1 : 1 + len(noted)] = noted

    @property
    def what_ran(self) -> str:
        """What the child noted last."""
        return self._page[1:].partition(b"\0")[0].decode(errors="replace")

    def over(self, status: int) -> None:
        """Note that the command came to its end."""
        self._page[0] = 1 + min(status & 0xFF, LARGEST)

    @property
    def status(self) -> int | None:
        """The exit status of a command that ended by itself. None means that it did not."""
        return self._page[0] - 1 if self._page[0] else None

    @contextmanager
    def until_over(self) -> Iterator[None]:
        """The command runs inside; however Python leaves it, it is over."""
        status = 1
        try:
            yield
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        finally:
            self.over(status)


def fork(notes: Notes) -> None:
    """Return in a child. The parent ends here, with the child's status, once the child has ended.

    Without POSIX processes nothing is supervised: the one process there is goes on.
    """
    if sys.platform == "win32":
        return
    child = os.fork()
    if child:
        _end(_Parent(child, notes).wait())
    _end_with_parent()


class _Parent:
    """Passes signals on. The second interrupt asks for the child's stacks and ends it."""

    def __init__(self, child: int, notes: Notes) -> None:
        self._child, self._notes = child, notes
        self._interrupts = 0

    def wait(self) -> int:
        """The status to end with: negative for a signal."""
        for name in PASSED_ON:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        if self._notes.status is not None:
            return self._notes.status or status
        print(self._describe(status), file=sys.stderr, flush=True)
        return status or ENDED_EARLY

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts < 2:
            os.kill(self._child, number)
            return
        os.kill(self._child, getattr(signal, STACKS))
        time.sleep(STACKS_S)
        os.kill(self._child, signal.SIGKILL)

    def _describe(self, status: int) -> str:
        from specdec.sdk.errors import ProposerError
        from specdec.sdk.exit_status import how_it_ended

        facts = {
            "running": self._notes.what_ran or "nothing of a plugin yet",
            "effect": "no result was written",
            "fix": "a plugin must not end the process (os._exit, a crash, a signal); raise an error instead",
        }
        return str(ProposerError("SD-E231", f"the process ended {how_it_ended(status)}, before the command did", facts))


def _end(status: int) -> None:
    """End this process as the child ended."""
    if status < 0:
        if -status != signal.SIGKILL:  # which nobody may handle
            signal.signal(-status, signal.SIG_DFL)
        _no_core_dump()
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _no_core_dump() -> None:
    """Write no core dump of a parent that only ends as its child ended."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_parent() -> None:
    """End this process when its parent is killed. Works on Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
