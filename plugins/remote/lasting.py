"""What changes a proposer in a process of its own for good: a process that is started later is told of it again."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.sdk import ProposerConfig
from specdec.sdk.errors import SpecdecError

from .proposer import AsksElsewhere

if TYPE_CHECKING:
    from torch import Tensor


class KeepsState(AsksElsewhere):
    """One that has state to save, and to load again."""

    def save(self, path: Path) -> None:
        """The process writes it, and one that is started later reads it, while it is there."""
        self._conversation.call("save", str(path.absolute()), again="save")

    def load(self, path: Path) -> None:
        """The process reads it, and one that is started later does too, while it is there."""
        self._conversation.call("load", str(path.absolute()), again="load")


class TakesWeights(AsksElsewhere):
    """One that takes new weights. They go there in files, which stay for processes that are started later."""

    def __init__(self, config: ProposerConfig[Any]) -> None:
        super().__init__(config)
        self._folder: Path | None = None  # from the first weights on
        self._numbers = count()
        self._files: dict[str, Path] = {}  # by the names of the tensors in them

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """The process takes them. Raises what the proposer raises there, or ProposerError SD-E336."""
        from safetensors.torch import save_file

        if self._folder is None or not self._folder.is_dir():  # who tidies up may have taken it away
            self._folder = Path(tempfile.mkdtemp(prefix="specdec-weights-"))
            self._remove = weakref.finalize(self, _remove, self._folder, os.getpid())
        file, names = self._folder / str(next(self._numbers)), "\n".join(sorted(tensors))
        save_file({name: each.detach().cpu().contiguous().clone() for name, each in tensors.items()}, file)
        try:
            self._conversation.call("update_weights", str(file), again=names)
        except SpecdecError:
            file.unlink(missing_ok=True)
            raise
        if names in self._files:
            self._files[names].unlink(missing_ok=True)
        self._files[names] = file

    def close(self) -> None:
        """Leave the drafter, and remove the files."""
        try:
            super().close()
        finally:
            if self._folder is not None:
                self._remove()


def _remove(folder: Path, owner: int) -> None:
    """In the process that made it: a fork of it may end before it does."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
