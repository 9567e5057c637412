"""What an engine and the keeper of its proposer's process say to each other: a line of JSON for each message.

The engine begins with an `Order`. `START` has the keeper fork a process, and `KILL` end it. The keeper and that process
report. When the engine's end of the pipe is closed, both end. It needs the extra `remote`, and loads no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .wire import Failed, Message

KEEPER = "specdec.adapters.serving.keeper"
"""The module that runs in the keeper's process."""

START, KILL, END = b"start\n", b"kill\n", b"end\n"


AheadSetting = Literal["auto"] | int
"""The most outcomes of a request that drafts are prepared for; 0 means none. auto: as many as pay."""


class Order(msgspec.Struct):
    """What every process of the keeper's runs."""

    target: dict[str, Any]  # a TargetInfo
    speculative_config: dict[str, Any]
    directory: str  # private; process number N listens to the file N there
    import_path: list[str]  # sys.path
    tokenizer: tuple[str, bool] | None  # a directory or a hub id, and whether code that lies there may run
    memory_mib: int | None  # beyond what libraries take. None means no limit
    num_threads: int | None
    ahead: AheadSetting
    grace_seconds: float  # to end in, and save its state
    states: int | None = None  # the file descriptor of SharedStates. None means that it reads no hidden states
    torch_compile: bool = False


class Ready(Message, tag=20):
    """The process listens."""

    number: int  # of the start, from 1 on


class Ended(Message, tag=21):
    """The process is gone."""

    number: int
    how: str  # "by SIGKILL", "with exit status 3"
    running: str  # the call of the proposer that ran; empty: none
    stack: str  # of a crash, or of a process that was ended because it hung


Report = Ready | Ended | Failed


def as_line(message: Order | Report) -> bytes:
    """A line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def socket_of(directory: str, number: int) -> str:
    """Where process number N listens."""
    return f"ipc://{directory}/{number}"


read_order = msgspec.json.Decoder(Order).decode
read_report = msgspec.json.Decoder(Report).decode
