"""An engine's plan: what its configuration comes to, known before any weight is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from specdec.sdk.errors import ConfigError, UnsupportedModelError
from specdec.sdk.extensions import KNOWN, Ahead, DraftKV, Trees
from specdec.sdk.needs import Needs
from specdec.sdk.ranges import MOST_NODES
from specdec.sdk.types import TargetInfo

from ..cache.block_pool import KnownBlocks
from ..config.engine_config import EngineConfig
from ..kernels.backend import compiler
from ..model.inference_form import check_quantization, check_stored_quantization, experts_settings
from ..model.model_class import text_config
from ..model.model_support import locate_model, longest_length, state_layers
from ..model.target import load_config
from ..proposing.speculation import Speculation, SpeculativeSettings
from ..registry import PluginSettings
from ..registry.hooks import HookPlugins, load_hooks
from .device import DeviceProfile, device_of, profile_of, require_host_default
from .memory import bytes_per_row, require_memory

logger = logging.getLogger("specdec")


@dataclass(frozen=True)
class PrefixCaching:
    """Whether requests that begin alike share KV blocks, and why not."""

    enabled: bool
    because: str

    @classmethod
    def decide(cls, asked: bool | None, num_state_layers: int, needs: Needs | None) -> Self:
        """asked: as `EngineConfig.enable_prefix_caching`. Raises ConfigError SD-E338 where it was asked for in vain."""
        obstacle = None
        if num_state_layers:
            obstacle = f"{num_state_layers} layers of the target keep a state, which lies in no block"
        elif needs is not None and needs.whole_prompt:
            obstacle = "the proposer has to see whole prompts (Needs.whole_prompt)"
        if obstacle and asked:
            facts = {"because": obstacle, "fix": "leave enable_prefix_caching out"}
            raise ConfigError("SD-E338", "enable_prefix_caching was asked for, and prefixes cannot be shared", facts)
        if asked is False:
            return cls(False, "enable_prefix_caching=False")
        return cls(False, obstacle) if obstacle else cls(True, "all that layers keep of a token is in its block")


@dataclass(frozen=True)
class Plan:
    """Resolved and admitted."""

    config: EngineConfig
    profile: DeviceProfile
    path: str  # of the checkpoint
    hf_config: Any
    dtype: torch.dtype
    info: TargetInfo
    plugins: PluginSettings  # which of them may be used
    hooks: HookPlugins
    speculation: Speculation | None  # None: plain decoding
    prefix_caching: PrefixCaching

    @classmethod
    def make(cls, config: EngineConfig, speculative_config: SpeculativeSettings, settings: PluginSettings) -> Plan:
        """Refuse what cannot run, the cheapest to know first. Raises SpecdecError."""
        require_host_default()
        experts_settings(config.moe_backend)
        check_quantization(config.quantization, "EngineConfig")
        path = locate_model(config.model)
        profile = profile_of(device_of(config.device), config.cpu_kernels)
        hf_config = load_config(path, trust_remote_code=config.trust_remote_code)
        check_stored_quantization(hf_config, config.quantization)
        dtype = profile.dtype(config.dtype, hf_config.dtype)
        info = target_info(config, path, text_config(hf_config), dtype, profile.device)
        hooks = load_hooks(settings)
        num_state_layers = len(state_layers(text_config(hf_config)))
        chains = "layers of the target keep a state, which has one successor", "a proposer of chains"
        withheld = {Trees.id: chains} if num_state_layers else {}
        speculation = Speculation.prepare(speculative_config, info, settings, hooks, withheld=withheld)
        needs = speculation.loaded.needs if speculation else None
        per_row = bytes_per_row(config, info, needs)
        require_memory("max_num_seqs", config.max_num_seqs, per_row, profile.device)
        prefixes = PrefixCaching.decide(config.enable_prefix_caching, num_state_layers, needs)
        logger.info("prefix caching is %s: %s", "on" if prefixes.enabled else "off", prefixes.because)
        return cls(config, profile, path, hf_config, dtype, info, settings, hooks, speculation, prefixes)

    @property
    def lookahead(self) -> int:
        """Positions past a request's newest token that a draft pass writes KV for."""
        return self.speculation.lookahead if self.speculation else 0

    def known_blocks(self) -> KnownBlocks | None:
        """Where prefixes are found again; None: nowhere."""
        if not self.prefix_caching.enabled:
            return None
        draft_kv = self.speculation.loaded.needs.extension(DraftKV) if self.speculation else None
        num_behind = int(draft_kv is not None and draft_kv.depends_on_next_token)
        return KnownBlocks(self.config.block_size, num_behind, learns_at_ends=draft_kv is None)

    @property
    def width(self) -> int:
        """The most drafts of one request in a step."""
        return self.speculation.loaded.config.width if self.speculation else 0

    @property
    def draws_trees(self) -> bool:
        """Whether drafts may have parents."""
        return self.speculation is not None and self.speculation.loaded.needs.extension(Trees) is not None

    @property
    def num_captured_tokens(self) -> int:
        """Tokens of the largest passes that are captured, one of the target and one of a drafter; 0: none are."""
        passes = self.profile.backend.passes
        if passes is None or self.config.cuda_graphs is False:
            return 0
        largest: int = passes.num_tokens(self.info.max_num_seqs, self.width, self.config.max_num_batched_tokens)
        return largest * (1 + (self.speculation is not None))

    @property
    def compiler(self) -> Any:
        """The module that compiles passes; None where that was not asked for, or it cannot be imported."""
        return compiler() if self.config.torch_compile else None


def target_info(
    config: EngineConfig, path: str, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> TargetInfo:
    """What proposers know of a target. Raises ConfigError SD-E148 (lengths), UnsupportedModelError SD-E142."""
    facts: dict[str, Any] = hf_config.to_dict()
    longest = longest_length(facts, hf_config.attribute_map)
    max_model_len = config.max_model_len or longest
    if max_model_len is None:
        raise ConfigError("SD-E148", "the model states no longest length", {"fix": "pass max_model_len"})
    if longest is not None and max_model_len > longest:
        raise ConfigError(
            "SD-E148",
            "max_model_len is above what the model serves",
            {"asked": max_model_len, "longest": longest},
        )
    num_heads = _num_heads(hf_config)
    return TargetInfo(
        model=str(config.model),
        checkpoint_dir=Path(path) if Path(path).is_dir() else None,
        config=facts,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        num_layers=hf_config.num_hidden_layers,
        num_kv_heads=facts.get("num_key_value_heads") or num_heads,
        head_dim=facts.get("head_dim") or hf_config.hidden_size // num_heads,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        extensions=frozenset(KNOWN) - {Ahead.id},
        max_nodes=MOST_NODES,
    )


def _num_heads(hf_config: Any) -> int:
    """Attention heads of a layer. 1 where every layer keeps a state instead."""
    try:
        num_heads: int = hf_config.num_attention_heads
    except AttributeError as error:
        if len(state_layers(hf_config)) == hf_config.num_hidden_layers:
            return 1
        facts = {"model_type": hf_config.model_type, "reason": "its configuration states no number of attention heads"}
        raise UnsupportedModelError("SD-E142", "this model cannot be served as a target", facts) from error
    return num_heads
