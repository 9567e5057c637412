"""The object that vLLM makes in each worker: a specdec proposer behind vLLM's `custom_class` interface."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoTokenizer

from specdec.core.host import Speculation, registry

from .compatibility import check_vllm
from .driver import Driver
from .engine_step import EngineStep
from .plan import describe_target, refuse_needs, refuse_plan
from .settings import read_settings
from .shared_target import SharedTarget


class Drafter:
    """Made before the target's weights load. The hooks show it each step before vLLM calls `propose`."""

    method: ClassVar[str | None] = None  # the proposer's name; None: as additional_config says

    def __init__(self, vllm_config: Any) -> None:
        """Raises PluginLoadError SD-E195, Refusal, ConfigError: whatever can be refused before weights load."""
        check_vllm()
        refuse_plan(vllm_config)
        asked, additional = vllm_config.speculative_config, vllm_config.additional_config
        config = read_settings(self.method, additional, asked.num_speculative_tokens, asked.draft_sample_method)
        plugin_settings = registry.PluginSettings.from_environment(os.environ)
        self._hooks = registry.load_hooks(plugin_settings)
        self._info = describe_target(vllm_config)
        speculation = Speculation.prepare(config, self._info, plugin_settings, self._hooks)
        assert speculation is not None, "a config was given"
        self._speculation = speculation
        self.needs = speculation.loaded.needs
        refuse_needs(self.needs, vllm_config)
        if self.needs.hidden_states:  # vLLM keys its compiled graphs by this mapping, and these change their outputs
            additional["specdec_hidden_states"] = list(self.needs.hidden_states)
        self._tokenizer = None if vllm_config.model_config.skip_tokenizer_init else vllm_config.model_config.tokenizer
        self._step: EngineStep | None = None
        self.logits: Tensor | None = None  # of the step that is sampled, for those who listen
        self.exit = ExitStack()  # closed when the worker shuts down, perhaps before the model was loaded
        from .hooks import install  # imports vLLM's runner

        install(Drafter)

    def load_model(self, target_model: Any) -> None:
        """After the target's weights: the proposer is made and bound. vLLM's CPU runner requires this method."""
        tokenizer = None if self._tokenizer is None else AutoTokenizer.from_pretrained(self._tokenizer)
        target = SharedTarget(target_model, self._info)
        self.driver = Driver(self._info, self._speculation, self._hooks.observers, target, tokenizer)
        self.exit.callback(self.driver.close)

    @property
    def listens(self) -> bool:
        """Whether a plugin wants to know what was verified."""
        return bool(self._hooks.observers.on_verified.get_hookimpls())

    def see(self, step: EngineStep) -> None:
        """The step whose sampled tokens `propose` is called with next."""
        self._step = step

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts in the order of vLLM's batch. What vLLM passes besides the sampled tokens is in the step already."""
        step, self._step = self._step, None
        assert step is not None, "the hooks show each step first"
        return self.driver.propose(step, sampled_token_ids)
