"""A target that is not there: what a proposer may still ask of it, read from the checkpoint when it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.adapters.target_tables import embedding_and_head
from specdec.core.model.hidden_states import HiddenState
from specdec.core.model.model_class import text_config
from specdec.core.model.target import load_config
from specdec.sdk import ConfigError

from ..recording import Manifest, fingerprint


class RecordedTarget:
    """The dtype, the device, and lazily the embedding and the head of a recorded target."""

    layer_shapes: Sequence[Any] = ()  # nothing is cached
    mixers = None  # and no layer keeps a state
    waits_for_experts = False

    def __init__(self, manifest: Manifest, directory: Path | None, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._manifest, self._directory = manifest, directory

    @property
    def model(self) -> RecordedTarget:
        """This object: it has the embedding and the head."""
        return self

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """The recorded target's embedding. Its weights are read at the first call."""
        return lambda token_ids: self._weights[0](token_ids)

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        """The recorded target's output head. Its weights are read at the first call."""
        return lambda hidden: self._weights[1](hidden)

    def capture(self, hidden_states: Sequence[HiddenState]) -> None:
        """Do nothing: the recording has the states already."""

    @cached_property
    def _weights(self) -> tuple[Any, Any]:
        if self._directory is None:
            facts = {
                "needed": "the target's embedding and head",
                "looked for": self._manifest.model,
                "fix": "put the checkpoint where it was recorded; replay and why take another place with --model",
            }
            raise ConfigError(
                "SD-E249", "the proposer needs weights of the target, which recordings do not hold", facts
            )
        require_same_model(self._manifest, self._directory)
        return embedding_and_head(self._directory, self.dtype, self.device)


OF_READER = {"_name_or_path", "transformers_version"}
"""Keys of a configuration that say where it lay and who read it, and nothing of the model."""


def require_same_model(manifest: Manifest, directory: Path) -> None:
    """Raise ConfigError: SD-E246 if a checkpoint is not the one that was recorded, SD-E143 if it needs code of its own.

    It may have moved, and be read by another version of transformers. Keys that were not recorded do not count.
    """
    read = text_config(load_config(str(directory))).to_dict()
    recorded = manifest.target.get("config") or read
    config = {key: value if key in OF_READER else read.get(key, value) for key, value in recorded.items()}
    found = fingerprint.of_model(directory, config)
    if manifest.model_fingerprint not in (None, found):
        facts = {
            "recorded": f"{manifest.model} ({manifest.model_fingerprint:.12})",
            "found": f"{directory} ({found:.12})",
            "fix": "name the recorded model's checkpoint with --model, or record this model",
        }
        raise ConfigError("SD-E246", "the recording is of another model", facts)
