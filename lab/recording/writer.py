"""Writes a recording in shards, and goes on with one that was cut short."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.sdk import ConfigError

from ..progress import counted
from .manifest import MANIFEST, Manifest
from .reader import Recording
from .request import RecordedRequest
from .shards import HIDDEN, LOGITS, pyarrow, tensor_name, write_shard

logger = logging.getLogger("specdec")

TOKENIZER = "tokenizer"
SHARD_REQUESTS, SHARD_BYTES, SHARD_SECONDS = 256, 64 * 2**20, 30.0
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, None}  # None: of a library that says only a text
FREE_TO_CHANGE: Mapping[str, bool | set[str]] = {
    **dict.fromkeys(("cost", "environment", "complete"), True),
    "engine": {"num_kv_blocks"},  # which follows the memory that is free
}
"""Of the manifest, between a recording and what is added to it."""


class RecordingWriter:
    """Takes requests as they end. What it holds back is on the disk after `flush`, `finish` or a full shard."""

    def __init__(self, folder: Path, manifest: Manifest, *, max_disk: int | None = None) -> None:
        """Begin in an empty or new folder, or go on with a recording under the same manifest.

        max_disk: most bytes of the folder. None means no limit.

        Raises ConfigError: SD-E243 without pyarrow, SD-E187, SD-E247 if the folder holds something else, SD-E248.
        """
        pyarrow()
        self.folder, self.manifest, self._max_disk = folder, manifest, max_disk
        self.done: frozenset[str] = frozenset()  # ids of requests that are in it already
        self._next, self.num_bytes = 0, 0
        self.num_left_out = 0  # prompts that are too long for the target, by what is known so far
        if (folder / MANIFEST).exists():
            self._go_on()
        else:
            self._begin()
        self._requests: list[RecordedRequest] = []
        self._tensors: dict[str, Tensor] = {}
        self._held, self._since = 0, time.monotonic()

    def add(self, request: RecordedRequest, hidden: Tensor | None = None, logits: Tensor | None = None) -> None:
        """Take a request. hidden: [S, L*H] by position. logits: [T, V]. Raises ConfigError SD-E248."""
        self._requests.append(request)
        for kind, tensor in ((HIDDEN, hidden), (LOGITS, logits)):
            if tensor is not None:
                self._tensors[tensor_name(kind, request.request_id)] = tensor.cpu()
                self._held += tensor.nbytes
        self._held += 4 * len(request.prompt_token_ids) + 8 * request.top_ids.numel() + 16 * len(request.token_ids)
        late = time.monotonic() - self._since > SHARD_SECONDS
        if late or len(self._requests) >= SHARD_REQUESTS or self._held >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held as a shard. Raises ConfigError SD-E248; earlier shards stay as they are."""
        if not self._requests:
            return
        room = None if self._max_disk is None else self._max_disk - self.num_bytes
        with self._naming_disk():
            self.num_bytes += write_shard(self.folder, self._next, self._requests, self._tensors, room)
        self.done |= {each.request_id for each in self._requests}
        self._next += 1
        self._requests, self._tensors = [], {}
        self._held, self._since = 0, time.monotonic()

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Put the target's tokenizer into the folder. Raises ConfigError SD-E187 or SD-E248."""
        with self._naming_disk():
            try:
                tokenizer.save_pretrained(self.folder / TOKENIZER)
            except Exception as error:
                if "(os error " not in str(error):  # its library has no class for those of the disk
                    raise
                raise OSError(None, str(error)) from error

    def finish(self, **changes: object) -> Manifest:
        """Write what is held, and the manifest as complete. changes: of the manifest. Returns it."""
        self.flush()
        self.manifest = self.manifest.replace(complete=True, **changes)
        with self._naming_disk():
            self.manifest.write(self.folder)
        return self.manifest

    def _begin(self) -> None:
        with self._naming_disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise _another(self.folder, "the folder holds other files")
            self.manifest.write(self.folder)

    def _go_on(self) -> None:
        there = Recording.open(self.folder)
        before, now = (each.model_dump(mode="json", exclude=FREE_TO_CHANGE) for each in (there.manifest, self.manifest))
        differing = sorted(key for key in now if now[key] != before[key])
        if differing:
            raise _another(self.folder, f"it was recorded with another {', '.join(differing)}")
        for path in there.torn():
            path.unlink()
            logger.warning("SD-W243 %s was torn when recording stopped; it is dropped and its requests run again", path)
        kept = {name: getattr(there.manifest, name) for name in ("engine", "cost", "complete")}
        self.manifest = self.manifest.replace(**kept)
        self.done = frozenset(there.request_ids)
        self._next, self.num_bytes = there.next_shard, there.num_bytes

    def _full(self, because: str) -> ConfigError:
        facts = {
            "because": because,
            "kept": f"{counted(len(self.done), 'request')} in {counted(self._next, 'shard')}, which can be replayed",
            "fix": "make room or raise --max-disk, and run the same command again: it goes on from there",
        }
        return ConfigError("SD-E248", f"no room for the recording in {str(self.folder)!r}", facts)

    @contextmanager
    def _naming_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in NO_ROOM
            raise (self._full(error.strerror or str(error)) if full else _unwritable(self.folder, error)) from error


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Make a folder if there is none, and keep other processes from recording into it. A process that ends lets it go.

    A folder that was made goes again where nothing was recorded.

    Raises ConfigError: SD-E187 for what is no folder or cannot be written, SD-E247 if it holds something else, or if
    another process records into it.
    """
    with ExitStack() as stack:
        try:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            if not (folder / MANIFEST).exists() and any(folder.iterdir()):
                raise _another(folder, "the folder holds other files")
            if sys.platform != "win32":
                lock = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, lock)
                _lock(lock, folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
        if is_new:
            stack.callback(_remove_if_empty, folder)  # before others may record into it
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # what holds anything stays
        folder.rmdir()


def _lock(opened: int, folder: Path) -> None:
    import fcntl  # not on every system

    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _another(folder, "another process records into it now", "name another folder, or wait") from error
    except OSError as error:  # of a file system without such locks
        logger.debug("%s cannot be locked: %s", folder, error)


def _another(folder: Path, found: str, fix: str = "name another folder, or the same settings") -> ConfigError:
    facts = {"found": found, "looked in": folder.absolute(), "fix": fix}
    return ConfigError("SD-E247", f"{str(folder)!r} is not the recording to go on with", facts)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    facts = {
        "because": error.strerror or str(error),
        "found at": error.filename or folder.absolute(),
        "fix": "name a folder that may be made and written",
    }
    return ConfigError("SD-E187", f"cannot write to {str(folder)!r}", facts)
