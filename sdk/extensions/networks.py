"""Draft networks in transformers' modelling code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..config import Extension, NetworkSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Networks(Extension):
    """Transformers networks that the engine makes ready to run: `load_causal_lm`, `build_decoder`, `finish`."""

    name: ClassVar[str] = "networks"
    version: ClassVar[int] = 1


class NetworkServices(Protocol):
    """The methods of `Services` for draft networks. Each raises Refusal if it was not asked for."""

    def load_causal_lm(
        self, checkpoint: str | Path, settings: NetworkSettings, tensors: Mapping[str, Tensor] | None = None
    ) -> Any:
        """A transformers causal LM from a checkpoint, ready to run. Its attention uses the draft KV.

        tensors: in the place of the model's parameters of these names. Raises ConfigError SD-E228 if one does not fit.
        None means those of the checkpoint.
        """
        ...

    def build_decoder(self, config: Mapping[str, Any], settings: NetworkSettings) -> Any:
        """A transformers decoder of a configuration: layers, rotary embedding, final norm.

        Its attention uses the draft KV. Its weights are random and its embedding is a stub of one row. Fill in the
        checkpoint's tensors, then call `finish`. Raises Refusal for a configuration that transformers does not know or
        the engine does not serve.
        """
        ...

    def finish(self, network: torch.nn.Module, settings: NetworkSettings) -> None:
        """Make an assembled network ready to run, in place: device, dtype, quantization, weight layout.

        With `torch_compile` its `forward` is traced once for each kind of arguments, so it must be a function of its
        tensors. A branch on a value ends compilation with a warning. `len(x)` in the place of `x.shape[0]` fixes the
        number of rows. An attribute that it sets stays as the trace left it.
        """
        ...
