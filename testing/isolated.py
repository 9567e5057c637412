"""Work in a fork of this process, which may end as it likes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, NamedTuple, NoReturn

import torch

from specdec.sdk.errors import ConfigError
from specdec.sdk.exit_status import how_it_ended

from .calls import Calls
from .supervision import Notes
from .time_limit import GRACE_S

LOOK_S = 0.01  # between two looks at whether the process is still there

STACK_S = 0.5
"""In which a process that hangs writes where it stands."""

MOST_STACK = 4000


class Ended(NamedTuple):
    """A process that ended before its work did."""

    how: str  # "by SIGSEGV", "with exit status 0", "because ..."
    running: str  # the call of a plugin
    stack: str  # of a crash, or of a process that took too long


def in_a_fork(work: Callable[[], str], timeout: float) -> str | Ended:
    """What the work returned there.

    timeout: seconds that the work gives itself. A little later its process is ended. 0 means as long as it likes.
    Raises ConfigError SD-E132 on a system that cannot fork.
    """
    if sys.platform == "win32":
        raise ConfigError("SD-E132", "nothing can be isolated here", {"fix": "a POSIX system"})
    notes = Notes()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as stacks:
        child = os.fork()
        if child == 0:
            _be_child(work, said, notes, stacks)
        how = _wait(child, timeout, stacks)
        text = _text_in(said)
        if text.endswith("\n"):
            return text
        stack = _text_in(stacks)[:MOST_STACK].strip()
    return Ended(how, notes.what_ran or "nothing of the proposer", stack)


def _be_child(work: Callable[[], str], said: IO[bytes], notes: Notes, stacks: IO[bytes]) -> NoReturn:
    try:
        torch.set_num_threads(1)  # its threads are in the parent alone, and work given to them would wait for ever
        faulthandler.disable()  # enabled already, it would not take back a signal that a library took
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # others would fill it before this one
        calls = Calls()
        calls.tell(lambda now, last: notes.running(str(now or last)))
        calls.listen()
        said.write(work().encode() + b"\n")
        said.flush()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)


def _wait(child: int, timeout: float, stacks: IO[bytes]) -> str:
    """How it ended."""
    end = time.monotonic() + timeout + GRACE_S if timeout else float("inf")
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return how_it_ended(os.waitstatus_to_exitcode(status))
        time.sleep(LOOK_S)
    _end(child, stacks)
    os.waitpid(child, 0)
    return f"because it took longer than {timeout:g} s"


def _text_in(file: IO[bytes]) -> str:
    """What was written to it from the start."""
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(child: int, stacks: IO[bytes]) -> None:
    """Kill the child, after it has written its stack."""
    os.kill(child, signal.SIGUSR1)
    end, before, size = time.monotonic() + STACK_S, -1, 0
    while time.monotonic() < end and not 0 < size == before:
        time.sleep(LOOK_S)
        before, size = size, os.fstat(stacks.fileno()).st_size
    os.kill(child, signal.SIGKILL)
