"""A proposer that was found, checked and admitted, and what the engine builds around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec.sdk.errors import ConfigError, Refusal, message
from specdec.sdk.extensions import Trees
from specdec.sdk.services import Services
from specdec.sdk.types import TargetInfo

from ..cache.kv_cache import LayerShape
from ..config.speculative_config import WHERE, SpeculativeConfig
from ..device_memory import spare_memory
from ..model.inference_form import check_quantization, experts_settings
from ..registry import HookPlugins, LoadedProposer, Observers, PluginSettings, Registry, load_proposer
from ..registry.functions import call_offered
from ..rejection.sampler import LOSSLESS, VerificationRule
from ..request.metrics import EngineMetrics
from .admission import Admission, Withheld, admit, target_layers_used
from .draft_store import DistributionBuffers
from .draft_table import DraftTable, distribution_width, target_to_draft
from .proposer_host import ProposerHost
from .views import ViewBuilder

logger = logging.getLogger("specdec")

SpeculativeSettings = str | Mapping[str, Any] | SpeculativeConfig | None


@dataclass(frozen=True)
class Speculation:
    """Known before any weight is loaded."""

    config: SpeculativeConfig
    loaded: LoadedProposer
    admission: Admission
    info: TargetInfo  # as the proposer is told
    rule: VerificationRule

    @classmethod
    def prepare(
        cls,
        asked: SpeculativeSettings,
        info: TargetInfo,
        settings: PluginSettings,
        hooks: HookPlugins,
        *,
        withheld: Withheld | None = None,
        allocates: bool = True,
    ) -> Speculation | None:
        """Resolve, check and admit what the user asked for; None if nothing. Raises ConfigError, PluginLoadError.

        `withheld`: see `admit`. They are taken out of `info.extensions`. `allocates`: whether the proposer will run in
        this process. If not, the device is not asked how much memory it has.
        """
        if asked is None:
            return None
        config = SpeculativeConfig.parse(asked)
        experts_settings(config.moe_backend)
        check_quantization(config.quantization, WHERE)
        registry = Registry.discover(settings, hooks)
        rule = LOSSLESS.get(config.rejection_sample_method) or _offered_rule(config, settings, hooks)
        if config.rejection_sample_method not in LOSSLESS:
            facts = {
                "found": f'"rejection_sample_method": "{config.rejection_sample_method}"',
                "effect": "what is generated depends on the drafts, and does not follow the target's distribution",
                "lossless": '"standard" and "block"',
            }
            logger.warning("%s", message("SD-W302", "drafts are verified by a lossy rule", facts))
            withheld = {
                Trees.id: ("a lossy rule verifies chains alone", '"rejection_sample_method": "standard"'),
                **(withheld or {}),
            }
        info = replace(info, extensions=info.extensions - set(withheld or ()))
        loaded = load_proposer(registry.resolve(config), config, info)
        config = config.replace(num_speculative_tokens=loaded.config.num_draft_tokens)
        budget = spare_memory(torch.device(info.device)) if allocates else None
        admission = admit(loaded, info, distribution_budget_bytes=budget, withheld=withheld)
        return cls(config, loaded, admission, info, rule)

    def require_cached(self, layers: Sequence[LayerShape]) -> None:
        """Refuse a target that caches no keys and values in a layer of which they are used. Raises Refusal."""
        vacant = [layer for layer in target_layers_used(self.loaded.needs) if not layers[layer].num_kv_heads]
        if vacant:
            reason = f"it uses keys and values of layer {', '.join(map(str, vacant))}, which stores none of them"
            refusal = Refusal(reason, "layers that attend: this one keeps a state, or nothing")
            raise refusal.attributed_on(self.loaded.plugin)

    @property
    def is_lossless(self) -> bool:
        """Whether what is generated follows the target's distribution."""
        return self.config.rejection_sample_method in LOSSLESS

    @property
    def lookahead(self) -> int:
        """Positions past the newest token that a draft pass writes KV for."""
        return self.loaded.needs.lookahead

    def distribution_buffers(self, device: torch.device) -> DistributionBuffers:
        """Storage for the declared form of distribution; none where verification will not read any."""
        needs, info = self.loaded.needs, self.info
        if not self.admission.keeps_distribution:
            return DistributionBuffers.none()
        shape = info.max_num_seqs, self.loaded.config.width, distribution_width(needs, info.vocab_size)
        vocabulary = needs.draft_vocabulary
        t2d = None if vocabulary is None else target_to_draft(vocabulary, info.vocab_size, device)
        return DistributionBuffers.allocate(needs.stored_form, shape, t2d, device)

    def draft_table(self, device: torch.device) -> DraftTable | None:
        """Where drafts stay on the device until they are verified; None for a proposer on the host."""
        if self.loaded.needs.placement == "host":
            return None
        return DraftTable(self.info.max_num_seqs, self.loaded.config.width, device)

    def host(
        self,
        services: Services,
        metrics: EngineMetrics,
        observers: Observers,
        device: torch.device,
        views: ViewBuilder | None = None,
        *,
        read_late: bool = False,
        kind: Callable[..., ProposerHost] = ProposerHost,
    ) -> ProposerHost:
        """The proposer, constructed and bound; `ProposerHost.warm_up` follows.

        `views`, `read_late`: see `ProposerHost`. `kind`: makes it of the same arguments.
        """
        policy, on_error = self.config.on_proposer_error, observers.on_proposer_error
        host = kind(self.loaded, self.info, device, policy, metrics, on_error, views, read_late=read_late)
        host.bind(self.info, services)
        return host


def _offered_rule(config: SpeculativeConfig, settings: PluginSettings, hooks: HookPlugins) -> VerificationRule:
    """The rule that a distribution offers by this name: a function of the configuration makes it."""
    name = config.rejection_sample_method
    told = hooks.relay.explain_key(key="rejection_sample_method", value=name)
    if told:
        raise ConfigError("SD-E132", f"rejection_sample_method is {name!r}", {"because": told})
    return call_offered("verification_rules", name, config, _as_rule, settings, LOSSLESS)


def _as_rule(found: VerificationRule) -> VerificationRule:
    if not callable(found):
        raise TypeError(f"a verification rule is a function, and this is {found!r}")
    return found
