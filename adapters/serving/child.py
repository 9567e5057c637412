"""The process of one engine's proposer: what a server does, with limits and notes for those who see it end."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from specdec.core.host import profile_of, registry
from specdec.sdk.child_wire import Order, Ready, as_line, socket_of
from specdec.sdk.errors import PluginId, ProposerError, SpecdecError
from specdec.sdk.types import TargetInfo
from specdec.sdk.wire import as_failed

from .hosted import Hosted, served_speculation
from .server import Server
from .sessions import Limits
from .told_to_end import told_to_end

MIB = 2**20
ENDED_FIRST = 500  # of -1000 .. 1000: where the machine's memory is short, Linux ends it rather than its engine
PR_SET_PDEATHSIG = 1


class Notes:
    """Which call of the proposer runs, in memory that its keeper has too: it is read when the process is gone."""

    SIZE = 1024

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, self.SIZE)

    def running(self, text: str) -> None:
        """Note it. Empty: none runs."""
        noted = text.encode(errors="replace")[: self.SIZE - 1] + b"\0"
        self._page[: len(noted)] = noted

    @property
    def what_runs(self) -> str:
        """The call that was noted last."""
        return self._page[:].partition(b"\0")[0].decode(errors="replace")

    def listen(self) -> None:
        """Note every call from now on."""
        calls: list[str] = []

        def heard(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "specdec.call":
                plugin: PluginId
                plugin, doing = arguments
                calls.append(f"{doing} of {plugin}")
            elif event == "specdec.call_ended" and calls:
                calls.pop()
            else:
                return
            self.running(calls[-1] if calls else "")

        sys.addaudithook(heard)


class Inherited(NamedTuple):
    """What the process has of its keeper's."""

    number: int
    orders: int  # file descriptors: of the engine's orders, which it does not read,
    reports: int  # and of reports
    stacks: IO[bytes]
    notes: Notes


def run(order: Order, tokenizer: Any, inherited: Inherited) -> None:
    """Construct the proposer and serve it, until SIGTERM. What is raised is reported."""
    try:
        with told_to_end() as ended:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _prepare(order, inherited)
            with _served(order, tokenizer, inherited.number) as server:
                os.write(inherited.reports, as_line(Ready(inherited.number)))
                server.serve(ended)
    except BaseException as error:
        told = error if isinstance(error, SpecdecError) else _unexpected(error)
        os.write(inherited.reports, as_line(as_failed(told)))
        raise SystemExit(1) from error


def _unexpected(error: BaseException) -> ProposerError:
    told = ProposerError("SD-E335", f"the process of a proposer failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _prepare(order: Order, inherited: Inherited) -> None:
    _end_with_keeper()
    os.setsid()  # what the proposer forks is ended with its group
    os.register_at_fork(after_in_child=lambda: os.close(inherited.reports))  # or the engine would wait for its end
    os.close(inherited.orders)
    os.open(os.devnull, os.O_RDONLY)
    faulthandler.disable()  # enabled already, it would not take back a signal that a library took
    faulthandler.enable(inherited.stacks)
    faulthandler.register(signal.SIGUSR1, inherited.stacks, all_threads=False)  # others would fill it before this one
    inherited.notes.listen()
    if order.num_threads is not None:
        torch.set_num_threads(order.num_threads)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(ENDED_FIRST))
    if order.memory_mib is not None:
        _limit(order.memory_mib * MIB)


@contextmanager
def _served(order: Order, tokenizer: Any, number: int) -> Iterator[Server]:
    told = order.target
    places = {"checkpoint_dir": _path_or_none(told["checkpoint_dir"]), "extensions": frozenset(told["extensions"])}
    info = TargetInfo(**told | places)
    logging.getLogger("specdec").addFilter(_not_said_before)
    settings = registry.PluginSettings.from_environment(os.environ)
    hooks = registry.load_hooks(settings)
    speculation = served_speculation(order.speculative_config, info, settings, hooks, order.ahead)
    asked = info, speculation, hooks.observers, tokenizer, order.ahead, order.states
    limits = Limits(max_sessions=2, idle_seconds=float("inf"))  # its engine, and what is left of an earlier connection
    address = socket_of(order.directory, number)
    with (
        profile_of(torch.device(info.device)).current(),
        closing(Hosted(*asked, torch_compile=order.torch_compile)) as hosted,
        closing(Server(hosted, address, limits, keeps_state=True)) as server,
    ):
        yield server


def _path_or_none(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _not_said_before(record: logging.LogRecord) -> bool:
    """What concerns the configuration was said by the engine, and an error goes to it."""
    return record.levelno > logging.WARNING


def _end_with_keeper() -> None:
    """End this process when its keeper is killed. Works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(num_bytes: int) -> None:
    """The most memory that it may take from now on. What is beyond raises MemoryError, or torch's RuntimeError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
