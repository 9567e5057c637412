"""What every command has in its process: an output for results alone, stacks of a crash, and a way out of a hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from specdec.testing.calls import Call, Calls, Interrupted
from specdec.testing.supervision import STACKS, Notes
from specdec.testing.time_limit import GRACE_S

STDOUT, STDERR = 1, 2  # file descriptors
EXIT_THREADS = 1


@contextmanager
def prepared(notes: Notes) -> Iterator[Calls]:
    """A command runs inside, and the calls of plugins are known."""
    faulthandler.enable(STDERR)
    with _results_alone() as calls:
        calls.tell(lambda now, last: notes.running(str(now) if now else f"nothing of a plugin; last was {last}"))
        calls.listen()
        if sys.platform != "win32":
            faulthandler.register(getattr(signal, STACKS), STDERR)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, Interrupted(calls))
        try:
            yield calls
        finally:
            threading.Thread(target=_end, name="specdec end", daemon=True).start()


def _end() -> None:
    """End the process where a plugin's thread would keep it for ever."""
    time.sleep(GRACE_S)
    left = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if left:
        told = f"the command is over, and threads of a plugin are not: {', '.join(left)}\n  fix  join them in close"
        print(told, file=sys.stderr, flush=True)
        os._exit(EXIT_THREADS)


@contextmanager
def _results_alone() -> Iterator[Calls]:
    """Standard output is for results: what a plugin prints there goes to standard error.

    So does what its libraries and subprocesses write to the file descriptor, and what is printed after the command.
    """
    calls = Calls()
    if sys.stdout is None or sys.stderr is None:  # it was closed
        yield calls
        return
    kept = sys.stdout
    results = open(os.dup(STDOUT), "w", encoding=kept.encoding, errors=kept.errors)  # noqa: SIM115 - to the exit
    os.dup2(STDERR, STDOUT)
    ours = threading.get_ident()

    def choose(now: Call | None, last: Call) -> None:
        if last.thread == ours:
            sys.stdout = results if now is None else sys.stderr

    calls.tell(choose)
    sys.stdout = results
    try:
        yield calls
    finally:
        with suppress(OSError):  # of which the command has told
            results.flush()
        sys.stdout = sys.stderr
