"""Reads a recording: its manifest at once, its shards as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from torch import Tensor

from specdec.sdk import ConfigError

from .manifest import Manifest, not_a_recording
from .request import RecordedRequest
from .shards import (
    HIDDEN,
    LOGITS,
    pyarrow,
    read_shard,
    read_tensor,
    require_whole,
    shard_files,
    shard_path,
    sums_of,
    tensor_name,
)


@dataclass(frozen=True)
class Recording:
    """A folder that `RecordingWriter` has written, complete or cut short."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Raises ConfigError: SD-E243 without pyarrow, SD-E244 for what is no recording, SD-E245 for a newer schema."""
        pyarrow()
        return cls(Path(folder), Manifest.read(Path(folder)))

    @classmethod
    def open_filled(cls, folder: Path | str) -> Self:
        """Open a recording to try proposers on. Raises what `open` does, and SD-E244 for one that holds no request."""
        recording = cls.open(folder)
        if not len(recording):
            raise not_a_recording(recording.folder, "it holds no request", "run the same `specdec record` again")
        return recording

    def __iter__(self) -> Iterator[RecordedRequest]:
        """Every request, in the order in which they were submitted. Raises ConfigError SD-E244 for a damaged shard."""
        return (request for request, _ in self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """The ids of all requests, in the order of the recording."""
        return list(self._requests)

    def hidden_states(self, request_id: str) -> Tensor:
        """[S, L*H] by position, layers as in the manifest: those that a proposer was shown.

        The last step shows none. Raises ConfigError SD-E249 if there are none.
        """
        return self._tensor(HIDDEN, request_id, "its hidden states", "--hidden-states")

    def logits(self, request_id: str) -> Tensor:
        """[T, V], of each committed position. Raises ConfigError SD-E249 if there are none."""
        return self._tensor(LOGITS, request_id, "full logits", "--full-logits")

    @property
    def num_bytes(self) -> int:
        """What its shards take on the disk."""
        return sum(path.stat().st_size for path in shard_files(self.folder).keys() - set(self.torn()))

    @property
    def next_shard(self) -> int:
        """The number of the first shard that is not there."""
        return max((number + 1 for number in self._shard_numbers()), default=0)

    def torn(self) -> list[Path]:
        """Files that a killed recorder left: parts of a shard that has no rows."""
        files, whole = shard_files(self.folder), self._shard_numbers()
        return [path for path, number in files.items() if path.suffix == ".tmp" or number not in whole]

    def _shard_numbers(self) -> list[int]:
        return sorted(number for path, number in shard_files(self.folder).items() if path.suffix == ".parquet")

    @cached_property
    def _whole(self) -> set[int]:
        """Shards whose tensors are known to be as they were written."""
        return set()

    @cached_property
    def _requests(self) -> dict[str, tuple[RecordedRequest, int]]:
        """Each request by its id, with the number of its shard."""
        found = []
        for number in self._shard_numbers():
            path = shard_path(self.folder, number, "parquet")
            require_whole(path, sums_of(self.folder, number))
            found += [(request, number) for request in read_shard(path, self.manifest.top_m)]
        return {each.request_id: (each, number) for each, number in sorted(found, key=lambda pair: pair[0].number)}

    def _tensor(self, kind: str, request_id: str, what: str, option: str) -> Tensor:
        if request_id not in self._requests:
            raise not_a_recording(self.folder, f"there is no request {request_id!r}")
        _, number = self._requests[request_id]
        if number not in self._whole:
            require_whole(shard_path(self.folder, number, "safetensors"), sums_of(self.folder, number))
            self._whole.add(number)
        tensor = read_tensor(self.folder, number, tensor_name(kind, request_id))
        if tensor is None:
            facts = {"recorded": str(self.folder), "fix": f"record again with {option}, into another folder"}
            raise ConfigError("SD-E249", f"the recording does not hold {what}", facts)
        return tensor
