"""What a proposer finds in the place of a target that runs in another process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from specdec.sdk.errors import Refusal
from specdec.sdk.types import TargetInfo

from ..target_tables import embedding_and_head


class NoTarget:
    """Has the target's device and dtype; its embedding and head are read from its checkpoint when they are used."""

    def __init__(self, info: TargetInfo) -> None:
        self.model = self
        self.device = torch.device(info.device)
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        self._info = info

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda token_ids: self._tables[0](token_ids)

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self._tables[1](hidden)

    @cached_property
    def _tables(self) -> tuple[nn.Module, nn.Module]:
        """Raises Refusal where they cannot be had."""
        try:
            directory = self._info.checkpoint_dir  # None for a hub id, whose files its engine has put into the cache
            directory = directory or Path(cached_file(self._info.model, "config.json")).parent
            return embedding_and_head(directory, self.dtype, self.device)
        except Exception as error:  # whatever files, configurations and modelling code raise
            reason = f"it uses the target's embedding or lm_head, and the target runs in another process: {error}"
            raise Refusal(reason, "tables of its own, or the engine's process") from error
