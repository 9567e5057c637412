"""SGLang's n-gram worker with a proposer in the place of its n-grams. SGLang verifies, commits and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.speculative import ngram_worker

from specdec.core.host import EngineConfig, load_tokenizer, target_info
from specdec.sdk.types import TargetInfo

from .chains import as_chains
from .drafting import Drafting
from .settings import read_settings


class Worker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
    """Drafts before each pass: by then the requests hold everything that earlier passes gave them."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        ngram_worker.NgramCorpus = _NoCorpus  # SGLang's compiles C++; this process has no other worker
        super().__init__(server_args, gpu_id, nccl_port, target_worker)

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """Make the proposer, once it is known how many requests can run. Raises what keeps it from starting."""
        super().alloc_memory_pool(**kwargs)
        info = _describe(self.model_runner, self.server_args.model_path, self.max_batch_size)
        trusted = self.server_args.trust_remote_code
        tokenizer = load_tokenizer(self.server_args.tokenizer_path, info.model, trust_remote_code=trusted)
        self.drafting = Drafting(read_settings(self.draft_token_num), info, tokenizer)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.drafting.finish(rid)

    def clear_cache_pool(self) -> None:
        """SGLang forgets its cached prefixes, of which a proposer has none."""

    def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The newest token of each request and its drafts, filled up: [B * D], and who sees whom: [B * D * D]."""
        drafts = self.drafting.propose(batch.reqs)
        newest = [req.output_ids[-1] for req in batch.reqs]
        return as_chains(newest, drafts, self.draft_token_num)

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Nothing: a proposer sees the outcome with the next step."""


class _NoCorpus:
    """In the place of SGLang's n-grams, which nobody asks."""

    def __init__(self, **_: object) -> None: ...

    def erase_match_state(self, request_ids: Sequence[str]) -> None: ...


def _describe(runner: Any, path: str, max_num_seqs: int) -> TargetInfo:
    """The facts of SGLang's target that proposers are told."""
    model = runner.model_config
    config = EngineConfig(
        model=path, device=str(runner.device), max_model_len=model.context_len, max_num_seqs=max_num_seqs
    )
    return target_info(config, path, model.hf_text_config, model.dtype, torch.device(runner.device))
