"""What a proposer finds in the place of a target that runs in another process."""

from __future__ import annotations

from typing import NoReturn

import torch

from specdec.sdk.errors import Refusal
from specdec.sdk.types import TargetInfo


class NoTarget:
    """Has the target's device and dtype, and nothing to compute with."""

    def __init__(self, info: TargetInfo) -> None:
        self.model = self
        self.device = torch.device(info.device)
        self.dtype: torch.dtype = getattr(torch, info.dtype)

    def get_input_embeddings(self) -> object:
        return _refuse_embed

    def get_output_embeddings(self) -> object:
        return _refuse_head


def _refuse_embed(*_: object) -> NoReturn:
    raise Refusal("it uses the target's embedding, and the target runs in another process", "an embedding of its own")


def _refuse_head(*_: object) -> NoReturn:
    raise Refusal("it uses the target's lm_head, and the target runs in another process", "a head of its own")
