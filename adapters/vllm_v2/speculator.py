"""What vLLM's V2 runner takes for its speculator: a specdec proposer, driven with the runner's steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from specdec.sdk.extensions import DraftKV

from ..vllm import method_of
from ..vllm_shared.engine_step import ask_for_states, hidden_states
from ..vllm_shared.prepare import Prepared
from ..vllm_shared.rows import RequestRows
from .agreement import Agreement
from .drafting import Drafting
from .pages import Pages
from .requests import Requests
from .step import StepReader


class Speculator(DraftModelSpeculator):  # type: ignore[misc]
    """Drives a proposer in the place of vLLM's speculator. It has no network of vLLM's own."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        """Not the base's, which lays out buffers for such a network. Raises ConfigError, Refusal, PluginLoadError."""
        self.vllm_config, self.device = vllm_config, device
        self.speculative_config = vllm_config.speculative_config
        self.num_speculative_steps = self.speculative_config.num_speculative_tokens
        self.dcp_size = 1
        self.supports_mm_inputs = False
        self.enable_adaptive_verification = False
        self.acceptance_estimator = self.draft_watermarker = self.eplb_state = self.pcp_manager = None
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list[Any] = []
        self.exit = ExitStack()  # closed when the worker shuts down, perhaps before the model was loaded
        self._prepared = Prepared.of(method_of(self.speculative_config.model), vllm_config)
        self.needs = self._prepared.needs
        self.requests = Requests()
        self._reader = StepReader(self.num_speculative_steps, req_states, self.requests)
        self._pages: Pages | None = None
        self._laid_out = False
        self.draft_logits: Tensor | None = None  # [rows, K, V], read by vLLM's verifier. None: every draft is one-hot
        if self._prepared.speculation.admission.keeps_distribution:
            info = self._prepared.speculation.info
            shape = (info.max_num_seqs, self.num_speculative_steps, info.vocab_size)
            self.draft_logits = torch.zeros(shape, device=device)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        raise NotImplementedError("the proposer loads what it drafts with")

    def load_model(self, target_model: Any) -> None:
        """Make and bind the proposer, once the target has its weights."""
        self.model = nn.Module()  # vLLM looks through it when it reloads weights and shuts down
        self._target = target_model
        self.reads_between = ask_for_states(target_model, self.needs)  # hidden states between layers
        info = self._prepared.speculation.info
        if (kv := self.needs.extension(DraftKV)) is not None:
            self._pages = Pages(kv, info, self.vllm_config, self.requests)
            self.draft_attn_layer_names = set(self._pages.layers)
        rows = RequestRows.with_blocks(info, None) if self._pages is None else self._pages.rows
        num_ranks = self.vllm_config.parallel_config.tensor_parallel_size
        # other ranks, and a scheduler that is told of drafts, get them from the host
        read_late = num_ranks == 1 and self.vllm_config.scheduler_config.async_scheduling
        self.driver = self._prepared.driver(target_model, rows, read_late=read_late)
        self.exit.callback(self.driver.close)
        self._drafting = Drafting(self.driver, self._reader, Agreement(num_ranks), self.draft_logits)

    def set_attn(self, model_state: Any, kv_cache_config: Any, *others: Any) -> None:
        """The layout of vLLM's cache is known: which of its groups the draft layers are in."""
        if self._pages is not None:
            self.requests.group = self._pages.find_group(kv_cache_config)

    def lay_out(self) -> None:
        """vLLM's cache is allocated."""
        self.driver.lay_out(None if self._pages is None else self._pages.storage())
        self._laid_out = True

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Drafts are made eagerly."""

    def capture(self) -> None:
        """Capture nothing: drafts are made eagerly."""

    @torch.inference_mode()
    def propose(  # noqa: PLR0913 - vLLM's own signature
        self,
        input_batch: Any,
        attn_metadata: Mapping[str, Any],
        slot_mappings: Mapping[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Drafts [B, K] int64 in the order of vLLM's batch, where each slot holds a token id.

        A dummy run has no requests: its rows are those of others, or vLLM made them up to warm up. The proposer is
        shown a step without any.
        """
        if dummy_run or not self.requests.keys() >= set(input_batch.req_ids):
            if self._laid_out and not is_profile:
                self.driver.idle()
            return torch.zeros(input_batch.num_reqs, self.num_speculative_steps, dtype=torch.int64, device=self.device)
        token_ids = input_batch.input_ids[: input_batch.num_tokens]
        embed = self._target.embed_input_ids
        hidden = hidden_states(self.needs, token_ids, last_hidden_states, aux_hidden_states, embed)
        logits = None
        if self._prepared.wants_logits:  # computed anew: vLLM's sampler writes into its own
            logits = self._target.compute_logits(last_hidden_states[input_batch.logits_indices])
        most = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        return self._drafting.drafts(input_batch, num_sampled, last_sampled, temperature, hidden, logits, most)
