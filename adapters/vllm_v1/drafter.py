"""The object that vLLM makes in each worker: a specdec proposer behind vLLM's `custom_class` interface."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor

from specdec.sdk.extensions import DraftKV

from ..vllm_shared.engine_step import EngineStep
from ..vllm_shared.plan import refuse_for_v1
from ..vllm_shared.prepare import Prepared
from ..vllm_shared.rows import RequestRows
from .compatibility import check_vllm


class Drafter:
    """Made before the target's weights load. The hooks show it each step before vLLM calls `propose`."""

    method: ClassVar[str | None] = None  # the proposer's name; None: as additional_config says

    def __init__(self, vllm_config: Any) -> None:
        """Raises PluginLoadError SD-E195, Refusal, ConfigError: whatever can be refused before weights load."""
        check_vllm()
        self._prepared = prepared = Prepared.of(self.method, vllm_config)
        self.needs = prepared.needs
        refuse_for_v1(self.needs, vllm_config)
        if self.needs.hidden_states:  # vLLM keys its compiled graphs by this mapping, and these change their outputs
            vllm_config.additional_config["specdec_hidden_states"] = list(self.needs.hidden_states)
        self.step: EngineStep | None = None  # whose sampled tokens `propose` is called with next
        self.logits: Tensor | None = None  # of the step that is sampled, for those who want them
        self.exit = ExitStack()  # closed when the worker shuts down, perhaps before the model was loaded
        from .hooks import install  # imports vLLM's runner

        install(Drafter)

    def load_model(self, target_model: Any) -> None:
        """Make and bind the proposer, once the target has its weights. vLLM's CPU runner requires this method."""
        speculation = self._prepared.speculation
        lookahead = speculation.lookahead if self.needs.extension(DraftKV) else None
        self.driver = self._prepared.driver(target_model, RequestRows.with_blocks(speculation.info, lookahead))
        self.driver.lay_out()
        self.exit.callback(self.driver.close)

    @property
    def wants_logits(self) -> bool:
        """Whether the proposer reads logits of the target."""
        return self._prepared.wants_logits

    @property
    def may_begin_late(self) -> bool:
        """Whether it drafts for a text whose beginning it was not shown."""
        return self.needs.extension(DraftKV) is None and not self.needs.whole_prompt

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts in the order of vLLM's batch. What vLLM passes besides the sampled tokens is in the step already."""
        step, self.step = self.step, None
        assert step is not None, "the hooks show each step first"
        return self.driver.propose(step, sampled_token_ids)
