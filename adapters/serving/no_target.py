"""What a proposer finds in the place of a target that runs in another process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import Refusal
from specdec.sdk.types import TargetInfo


class NoTarget:
    """Has the target's device and dtype; its embedding and head are read from its checkpoint when they are used."""

    def __init__(self, info: TargetInfo) -> None:
        self.model = self
        self.device = torch.device(info.device)
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        self._directory = info.checkpoint_dir

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda token_ids: functional.embedding(token_ids, self._embedding)

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda hidden: functional.linear(hidden, self._head)

    @cached_property
    def _embedding(self) -> Tensor:  # [V, H]
        return self._table("embedding", nn.Embedding, self._weightless.get_input_embeddings())

    @cached_property
    def _head(self) -> Tensor:  # [V, H]
        return self._table("lm_head", nn.Linear, self._weightless.get_output_embeddings())

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        if self._directory is None:
            raise _refusal("embedding or lm_head", "there is no checkpoint of it")
        return Checkpoint.open(self._directory)

    @cached_property
    def _weightless(self) -> Any:
        """The target's modules, without numbers."""
        directory = self._checkpoint.directory
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        except Exception as error:  # whatever modelling code and its configuration raise
            raise _refusal("embedding or lm_head", f"{type(error).__name__}: {error}") from error

    def _table(self, name: str, kind: type[nn.Module], module: nn.Module) -> Tensor:
        """The weight of a module that does nothing but look up, or multiply."""
        if type(module) is not kind or getattr(module, "bias", None) is not None:
            raise _refusal(name, f"it is a {type(module).__name__} that does more than its table says")
        every = self._weightless.named_parameters(remove_duplicate=False)
        paths = [path for path, weight in every if weight is module.weight]
        stored = next((path for path in paths if path in self._checkpoint.shapes), None)
        if stored is None:
            raise _refusal(name, f"its checkpoint has none of the tensors {', '.join(paths)}")
        return self._checkpoint.tensor(stored).to(self.device, self.dtype)


def _refusal(name: str, reason: str) -> Refusal:
    return Refusal(
        f"it uses the target's {name}, which cannot be read in another process: {reason}",
        "tables of its own, or the engine's process",
    )
