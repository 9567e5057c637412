"""The target: a transformers causal LM that runs ragged batches over our paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from specdec.sdk.errors import ConfigError, Refusal, UnsupportedModelError

from ..cache.kv_cache import LayerShape
from ..cache.state_store import StatePass
from ..kernels.attention_spec import AttentionContext
from .attention import (
    ATTENTION_NAME,
    CONTEXT,
    MASKS,
    MODULES,
    ShapeProbe,
    attending_by,
    attention_arguments,
    carry_arguments,
    unserved_attention,
)
from .find_mixers import checked_mixers, watched_mixers
from .hidden_states import HiddenState, HiddenStates
from .inference_form import experts_settings
from .loading import loading, straight_to
from .masks import ASKING_NAME, Limits, hand_on
from .mixers import Mixer, Mixers
from .modalities import leave_out_unused
from .model_class import NO_POSITIONS, auto_class, drops_positions, no_interface, refuse_class, text_config
from .model_support import read_config, refuse_unsupported, slides, state_layers, storing_nothing

_NO_KV = LayerShape(0, 0, 0)
_Probed = tuple[ShapeProbe, list[Mixer], Tensor]
"""What attention was asked for, the layers that keep a state, and logits."""
_REMOTE_CODE = "a model whose code comes with its checkpoint needs trust_remote_code=True"


@dataclass(frozen=True)
class ForwardInput:
    """A ragged batch as tensors: N tokens of one or more requests, R rows whose logits are needed."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    logits_rows: Tensor  # [R] int64, indices into the N tokens
    cache: AttentionContext  # where attention finds earlier keys and values and puts the new ones
    states: StatePass | None = None  # of layers that keep a state; None: the target has none


@dataclass(frozen=True)
class TargetOutput:
    """Results of one forward pass."""

    logits: Tensor  # [R, V], the rows the batch asked for
    hidden: tuple[Tensor, ...]  # L of [N, H], those that were asked for


class Target(Protocol):
    """Whatever computes logits: the engine's own form of a model, or an adapter's."""

    def forward(self, inputs: ForwardInput) -> TargetOutput: ...


class TargetModel:
    """Weights and modelling code come from transformers; batching, attention and cache are ours."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model  # a transformers causal LM
        self.config = text_config(model.config)
        self.device = device
        self.dtype: torch.dtype = model.dtype
        self.run: Callable[..., Tensor] = self.run_model  # or another form of the same
        self.attention_modules: dict[int, nn.Module] = {}  # by layer, as the first pass found them
        self.windows: list[int | None] = []  # of the layers
        self.mixers: Mixers | None = None  # layers that keep a state, as the first pass found them
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.layer_shapes = self._probe()
        self._hidden = HiddenStates(model, (), self.num_layers)
        if self.config is not model.config:
            leave_out_unused(model, partial(self.dummy_pass, 2, 1))

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
        """Load a checkpoint, all of it.

        Raises ConfigError SD-E143 if transformers cannot, SD-E188 if tensors are missing; UnsupportedModelError.
        """
        experts = experts_settings(moe_backend)
        with loading("SD-E143", f"cannot load the model {path!r}", {"trust_remote_code": _REMOTE_CODE}):
            try:
                model, report = auto_class(config).from_pretrained(
                    path,
                    config=config,
                    dtype=dtype,
                    attn_implementation=ATTENTION_NAME,
                    trust_remote_code=trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by their names
                    **straight_to(device),
                    **experts,
                )
            except KeyError as error:
                if error.args == (ATTENTION_NAME,):
                    raise no_interface(config, "its attention classes are its own") from error
                raise
            _check_tensors(path, report)
            return cls(model.to(device).eval(), device)

    @property
    def num_layers(self) -> int:
        return len(self.layer_shapes)

    def _probe(self) -> list[LayerShape]:
        """What each layer stores, seen in one pass over two tokens rather than guessed from the configuration."""
        if not self._takes_positions and len(state_layers(self.config)) < self.config.num_hidden_layers:
            raise no_interface(self.config, NO_POSITIONS)
        if self._takes_positions and drops_positions(self.model):
            raise no_interface(self.config, "it counts positions in a way of its own")
        try:
            probe, mixers, logits = self._first_pass_of_all_layers()
        except UnsupportedModelError:
            raise
        except Refusal as error:  # attention was called without what serves it
            raise no_interface(self.config, f"its layers do not hand {CONTEXT} on to attention") from error
        except Exception as error:  # modelling code that expects masks, caches or attention of its own
            raise no_interface(self.config, f"{type(error).__name__}: {error}") from error
        if len(logits) != 1:
            raise no_interface(self.config, "its head ignores logits_to_keep, by which rows are chosen")
        num_layers = self.config.num_hidden_layers
        self._check_layers(probe.layers, [mixer.layer for mixer in mixers])
        self.mixers = checked_mixers(self.config.model_type, mixers)
        if self.mixers is not None:
            self.mixers.install()
        self._take_limits(probe)
        if probe.layers and probe.dtypes != {self.dtype}:
            computed = ", ".join(sorted(map(str, probe.dtypes)))
            reason = f"it computes in {computed} where the model is in {self.dtype}"
            raise unserved_attention(reason, model_type=self.config.model_type)
        return [probe.layers.get(layer, _NO_KV) for layer in range(num_layers)]

    def _check_layers(self, attending: Collection[int], stateful: Collection[int]) -> None:
        """Every layer attends, keeps a state, or is known to transformers' cache as one that stores nothing."""
        num_layers = self.config.num_hidden_layers
        known = {*attending, *stateful, *storing_nothing(self.config)}
        if not (attending or stateful) or not set(range(num_layers)) <= known or not known <= set(range(num_layers)):
            unknown = f", and {len(stateful)} keep a state in transformers' cache" if state_layers(self.config) else ""
            raise no_interface(self.config, f"{len(attending)} of {num_layers} layers call it{unknown}")

    def _first_pass_of_all_layers(self) -> _Probed:
        """Layers that do not hand their arguments on to attention are helped."""
        try:
            return self._first_pass()
        except Refusal:  # attention was called without what serves it
            carry_arguments(self.model, self.model.get_decoder())
            return self._first_pass()

    def _first_pass(self) -> _Probed:
        """What two tokens show of the layers, and the logits of the last one.

        Models that cannot do with `Limits` in the place of a mask are not asked for these.
        """
        try:
            with attending_by(ASKING_NAME, self.model):
                return self._probing_pass()
        except (UnsupportedModelError, Refusal):
            raise
        except Exception:
            return self._probing_pass()

    def _probing_pass(self) -> _Probed:
        probe = ShapeProbe()
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        rows = torch.ones(1, dtype=torch.int64, device=self.device)
        arguments = {CONTEXT: probe, MODULES: self.attention_modules, MASKS: probe.masks}
        with torch.inference_mode(), watched_mixers(self.model, self.config) as mixers:
            logits = self.run(tokens, positions, rows, **arguments)
        return probe, mixers, logits

    def _take_limits(self, probe: ShapeProbe) -> None:
        """Make a layer state a limit that only the mask of transformers would have."""
        for layer, mask in probe.masks.items():
            if mask != Limits(probe.windows[layer]):
                hand_on(mask, self.attention_modules[layer])
        config, limits = self.config.to_dict(), {layer: Limits(each) for layer, each in probe.windows.items()}
        limits |= probe.masks
        unsaid = [layer for layer, each in limits.items() if each == Limits() and slides(config, layer)]
        if unsaid:
            layers = ", ".join(map(str, sorted(unsaid)))
            reason = f"layers {layers} are configured to slide, and call it without a window"
            raise unserved_attention(reason, model_type=self.config.model_type)
        self.windows = [each.window or each.chunk for each in limits.values()]

    def dummy_pass(self, num_tokens: int, num_rows: int, context: AttentionContext | None = None) -> None:
        """A pass of this many tokens, with logits for the last `num_rows`: for what it takes. None: without a cache."""
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.zeros_like(tokens)
        rows = torch.arange(num_tokens - num_rows, num_tokens, device=self.device)
        self._forward(tokens, positions, context or ShapeProbe(), rows).float().softmax(dim=-1)

    def _forward(self, tokens: Tensor, positions: Tensor, context: AttentionContext, logits_rows: Tensor) -> Tensor:
        rows = logits_rows if len(logits_rows) else logits_rows.new_zeros(1)  # none is one more case for a compiler
        with torch.inference_mode():
            return self.run(tokens, positions, rows, **attention_arguments(context))[: len(logits_rows)]

    def run_model(
        self, tokens: Tensor, positions: Tensor, logits_rows: Tensor, *, model: Any = None, **attention: Any
    ) -> Tensor:
        """Logits [R, V] of tokens and positions [1, N], as the library's model computes them.

        model: another form of it. None means the whole.
        """
        placed = {"position_ids": positions} if self._takes_positions else {}
        model = self.model if model is None else model
        output = model(input_ids=tokens, use_cache=False, logits_to_keep=logits_rows, **placed, **attention)
        logits: Tensor = output.logits[0]
        return logits

    def forward(self, inputs: ForwardInput) -> TargetOutput:
        """Run a pass over a ragged batch. Its new keys and values are in the cache afterwards."""
        tensors = inputs.token_ids[None], inputs.positions[None], inputs.cache, inputs.logits_rows
        if inputs.states is None or self.mixers is None:
            logits = self._forward(*tensors)
        else:
            with self.mixers.pass_over(inputs.states):
                logits = self._forward(*tensors)
        return TargetOutput(logits, self._hidden.take() if self._hidden.wanted else ())

    @property
    def kept_hidden_states(self) -> MutableMapping[HiddenState, Tensor]:
        """Filled by hooks in every pass, and emptied after it."""
        return self._hidden.kept

    @property
    def waits_for_experts(self) -> bool:
        """Whether a pass reads on the host which experts are wanted: transformers' "eager" form loops over them."""
        offers_forms: bool = self.model._can_set_experts_implementation()
        return offers_forms and self.config._experts_implementation == "eager"

    def capture(self, hidden_states: Sequence[HiddenState]) -> None:
        """Make every forward pass return these hidden states: boundaries 0 .. num_layers, or 'final'. Called once."""
        self._hidden = HiddenStates(self.model, hidden_states, self.num_layers)
        if hidden_states:  # states of another form are refused now, and not in a step
            self.dummy_pass(2, 1)
            self._hidden.take()


def _check_tensors(path: str, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks tensors; tied ones are not missing. Unused ones transformers has warned of.

    `report`: what `from_pretrained` says of its loading.
    """
    unused = sorted(report["unexpected_keys"])
    others = [f"{name} {list(found)}, expected {list(expected)}" for name, found, expected in report["mismatched_keys"]]
    missing = sorted(set(report["missing_keys"]) - {name for name, _, _ in report["mismatched_keys"]})
    if missing or others:
        facts = {"missing": _some(missing), "of another size": _some(sorted(others)), "unused": _some(unused)}
        facts["fix"] = "a checkpoint of a causal LM, and its own config.json; embedding and reward models have no head"
        told = {label: fact for label, fact in facts.items() if fact}
        raise ConfigError("SD-E188", f"the checkpoint {path!r} lacks tensors of its model", told)


def _some(names: Sequence[str], most: int = 6) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """A checkpoint's transformers configuration. Raises ConfigError SD-E140, SD-E143 or UnsupportedModelError."""
    read_config(path)
    with loading("SD-E143", f"cannot load the configuration of {path!r}", _CONFIG_FIXES):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        refuse_unsupported(text_config(config), with_states=True)
    refuse_class(config)
    return config


_CONFIG_FIXES = {
    "trust_remote_code": _REMOTE_CODE,
    "does not recognize this architecture": f"a newer transformers, or: {_REMOTE_CODE}",
}
