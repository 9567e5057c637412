"""What SGLang asks of an algorithm before it makes a worker."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from .compatibility import check_sglang
from .settings import read_settings, refuse_plan


class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Drafts come from outside a network of SGLang's, as those of its n-grams do. So it is told to treat them alike."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:  # asked of every algorithm, and missing in the base class
        return False

    def need_topk(self) -> bool:  # likewise
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, *args: Any, **kwargs: Any) -> FutureMap:
        """Likewise. What relays tokens between overlapping steps; here steps follow one another."""
        return FutureMap(device, self, req_to_token_pool, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        """Settle what SGLang settles for n-grams. Raises PluginLoadError SD-E195, ConfigError, Refusal."""
        check_sglang()
        read_settings(server_args.speculative_num_draft_tokens)
        refuse_plan(server_args)
        server_args.disable_overlap_schedule = True
        server_args.enable_mixed_chunk = False
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48
