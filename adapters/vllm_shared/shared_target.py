"""What vLLM's target provides to a proposer: its embedding and its head, whole on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.checkpoint import logit_scale
from specdec.sdk.types import TargetInfo


class SharedTarget:
    """vLLM's model where the engine's services expect a transformers model.

    Under tensor parallelism both layers are collectives of all ranks: each rank runs the proposer on the same inputs.
    """

    def __init__(self, model: Any, info: TargetInfo) -> None:
        self.model = self
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        self._vllm_model = model
        self._logit_scale = logit_scale(info.config) or 1.0
        self._wrapped = _wrapped_for_adapters(model)

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return self._embed

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        return self._head

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[..., H] for [...] int64."""
        with self._without_adapters():
            embedded: Tensor = self._vllm_model.embed_input_ids(token_ids.flatten())
        return embedded.view(*token_ids.shape, -1)

    def _head(self, hidden: Tensor) -> Tensor:
        """[..., V] for [..., H], without the scale that vLLM puts into its logits."""
        with self._without_adapters():
            logits: Tensor = self._vllm_model.compute_logits(hidden.flatten(0, -2))
        return logits.view(*hidden.shape[:-1], -1) / self._logit_scale

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """vLLM's LoRA layers look up adapters of the batch that the target ran, whose rows are not the drafter's."""
        for parent, name, layer in self._wrapped:
            setattr(parent, name, layer.base_layer)
        try:
            yield
        finally:
            for parent, name, layer in self._wrapped:
                setattr(parent, name, layer)


def _wrapped_for_adapters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Where the embedding and the head are layers with LoRA: the parent of each, its name there, the layer."""
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "base_layer" in dict(child.named_children())
    ]
    if not layers:
        return []
    from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

    kinds = (LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
    return [each for each in layers if isinstance(each[2], kinds)]
