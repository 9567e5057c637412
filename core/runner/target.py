"""The target: a transformers causal LM that runs ragged batches over our paged cache."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.sdk import ConfigError, UnsupportedModelError
from specdec.sdk.errors import did_you_mean

from .attention import ATTENTION_NAME, AttentionContext, ShapeProbe, attention_arguments
from .batch import Batch
from .hidden_states import HiddenState, HiddenStates
from .kv_cache import LayerShape
from .model_support import refuse_unsupported


@dataclass(frozen=True)
class TargetOutput:
    """Results of one forward pass."""

    logits: Tensor  # [R, V], the rows the batch asked for
    hidden: Tensor | None  # [N, L*H]; None if nobody asked


class Target(Protocol):
    """Whatever computes a batch's logits: the engine's own form of a model, or an adapter's."""

    model: Any  # a transformers causal LM
    device: torch.device
    dtype: torch.dtype

    def forward(self, batch: Batch) -> TargetOutput: ...


class TargetModel:
    """Weights and modelling code come from transformers; batching, attention and cache are ours."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model  # a transformers causal LM
        self.config = model.config
        self.device = device
        self.dtype: torch.dtype = model.dtype
        self.run: Callable[..., Tensor] = self._run_model  # or another form of the same
        self.layer_shapes = self._probe()
        self._hidden = HiddenStates(model, (), self.num_layers)

    @classmethod
    def load(
        cls,
        path: str,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        moe_backend: str | None,
        *,
        trust_remote_code: bool = False,
    ) -> TargetModel:
        """Load a checkpoint. Raises ConfigError SD-E143 if transformers cannot."""
        experts = experts_settings(moe_backend)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=trust_remote_code,
                **experts,
            )
        except (OSError, ValueError, KeyError) as error:
            if error.args == (ATTENTION_NAME,):
                raise _no_interface(config, "its attention classes are its own") from error
            raise ConfigError("SD-E143", f"cannot load the model {path!r}", {"because": error}) from error
        return cls(model.to(device).eval(), device)

    @property
    def num_layers(self) -> int:
        return len(self.layer_shapes)

    def _probe(self) -> list[LayerShape]:
        """What each layer stores, seen in one pass over two tokens rather than guessed from the configuration."""
        probe = ShapeProbe()
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        try:
            logits = self._forward(tokens, positions, probe, torch.ones(1, dtype=torch.int64, device=self.device))
        except UnsupportedModelError:
            raise
        except Exception as error:  # modelling code that expects masks, caches or attention of its own
            raise _no_interface(self.config, f"{type(error).__name__}: {error}") from error
        if len(logits) != 1:
            raise _no_interface(self.config, "its head ignores logits_to_keep, by which rows are chosen")
        num_layers = self.config.num_hidden_layers
        if sorted(probe.layers) != list(range(num_layers)):
            raise _no_interface(self.config, f"{len(probe.layers)} of {num_layers} layers call it")
        return [probe.layers[layer] for layer in range(num_layers)]

    def dummy_pass(self, num_tokens: int, num_rows: int, context: AttentionContext | None = None) -> None:
        """A pass of this many tokens, with logits for the last `num_rows`: for what it takes. None: without a cache."""
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.zeros_like(tokens)
        rows = torch.arange(num_tokens - num_rows, num_tokens, device=self.device)
        self._forward(tokens, positions, context or ShapeProbe(), rows).float().softmax(dim=-1)

    def _forward(self, tokens: Tensor, positions: Tensor, context: AttentionContext, logits_rows: Tensor) -> Tensor:
        with torch.inference_mode():
            if len(logits_rows):
                return self.run(tokens, positions, logits_rows, **attention_arguments(context))
            one = logits_rows.new_zeros(1)  # none would be one more case for a compiler
            return self.run(tokens, positions, one, **attention_arguments(context))[:0]

    def _run_model(self, tokens: Tensor, positions: Tensor, logits_rows: Tensor, **attention: Any) -> Tensor:
        """Logits [R, V] of tokens and positions [1, N], as the library's model computes them."""
        output = self.model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=logits_rows, **attention
        )
        logits: Tensor = output.logits[0]
        return logits

    def forward(self, batch: Batch) -> TargetOutput:
        """One pass over a ragged batch; its new keys and values are in the cache afterwards."""
        logits = self._forward(batch.token_ids[None], batch.positions[None], batch.cache, batch.logits_rows)
        return TargetOutput(logits, self._hidden.take())

    @property
    def kept_hidden_states(self) -> MutableMapping[HiddenState, Tensor]:
        """Filled by hooks in every pass, and emptied after it."""
        return self._hidden.kept

    def capture(self, hidden_states: Sequence[HiddenState]) -> None:
        """Make every forward pass return these hidden states: boundaries 0 .. num_layers, or 'final'. Called once."""
        self._hidden = HiddenStates(self.model, hidden_states, self.num_layers)


def experts_settings(moe_backend: str | None) -> dict[str, str]:
    """What `from_pretrained` is told: nothing for None and "auto", so that transformers chooses.

    Raises ConfigError SD-E132 for a name that transformers does not know.
    """
    if moe_backend in (None, "auto"):
        return {}
    offered = ["auto", "eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]
    if moe_backend not in offered:
        suggestion = did_you_mean(str(moe_backend), offered)
        facts = {"found": repr(moe_backend), "expected": ", ".join(offered)}
        facts |= {"did you mean": suggestion} if suggestion else {}
        raise ConfigError("SD-E132", "moe_backend names no experts implementation", facts)
    return {"experts_implementation": str(moe_backend)}


def _no_interface(config: Any, because: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "SD-E144",
        "this model does not run through transformers' common interface (attention and logits_to_keep)",
        {"model_type": config.model_type, "because": because},
    )


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """A checkpoint's transformers configuration. Raises ConfigError or UnsupportedModelError."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "SD-E140",
            f"there is no model {path!r}",
            {"because": str(error).splitlines()[0], "models": "a directory, a hub id, or 'tiny' (packaged)"},
        ) from error
    refuse_unsupported(config.to_dict())
    return config
