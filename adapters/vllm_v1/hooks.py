"""The methods of vLLM's V1 runner that are wrapped in the worker, because `custom_class` is told too little.

Installed once per process, by the first drafter. Runners without one of ours behave as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specdec.sdk.needs import Needs

from ..vllm_shared.driver import Driver
from ..vllm_shared.engine_step import EngineStep, ask_for_states
from ..vllm_shared.wrapping import around, wrap
from .step import read_step


class Drafter(Protocol):
    """What the hooks use of a runner's drafter."""

    needs: Needs
    driver: Driver
    exit: ExitStack
    wants_logits: bool
    may_begin_late: bool
    logits: Tensor | None
    step: EngineStep | None


@cache
def install(drafter_class: type[Drafter]) -> None:
    """Wrap, once, for runners whose drafter is of this class."""
    for name, replacement in REPLACEMENTS.items():
        wrap(GPUModelRunner, name, replacement, "drafter", drafter_class)
    if current_platform.is_cpu():
        constrain = rejection_sampler.apply_sampling_constraints
        rejection_sampler.apply_sampling_constraints = around(constrain, _apply_sampling_constraints)
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


def _update_states(drafter: Drafter, original: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    ended = set(scheduler_output.finished_req_ids)
    if drafter.may_begin_late:  # the next turn of a session has the id of the one before
        ended |= {new.req_id for new in scheduler_output.scheduled_new_reqs}
    drafter.driver.begin_step(ended, scheduler_output.preempted_req_ids or set())
    return original(runner, scheduler_output)


def _input_fits_in_drafter(drafter: Drafter, original: Callable[..., Any], runner: Any, common_metadata: Any) -> bool:
    """Always: vLLM would draft K zeros for everybody as soon as one request is near the longest length."""
    return common_metadata is not None


def _set_up_hidden_states(drafter: Drafter, original: Callable[..., Any], runner: Any) -> None:
    """Have the target return the states between layers that are wanted."""
    if ask_for_states(runner.get_model(), drafter.needs):
        runner.use_aux_hidden_state_outputs = True


def _propose(drafter: Drafter, original: Callable[..., Any], runner: Any, *arguments: Any) -> Any:
    scheduler_output, _, _, final, _, between, *_ = arguments  # by position, in the order that PARAMETERS has
    logits, drafter.logits = drafter.logits, None
    drafter.step = read_step(runner, scheduler_output, final, between, drafter.needs, logits)
    return original(runner, *arguments)


def _sample(drafter: Drafter, original: Callable[..., Any], runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """Where somebody wants them, the logits are kept as they are before vLLM's sampler writes into them."""
    drafter.logits = logits.clone() if drafter.wants_logits and logits is not None else None
    return original(runner, logits, spec_decode_metadata)


def _draft_probs(drafter: Drafter, original: Callable[..., Any], runner: Any, spec_decode_metadata: Any) -> Any:
    """Draft distributions in the order of the batch that verifies. A request that skipped a step keeps its own."""
    lengths = spec_decode_metadata.num_draft_tokens
    ids = iter(spec_decode_metadata.draft_token_ids.tolist())
    drafts = [list(islice(ids, length)) for length in lengths]
    return drafter.driver.dense_rows_of(runner.input_batch.req_ids, drafts)


def _shut_down(drafter: Drafter, original: Callable[..., Any], runner: Any) -> None:
    drafter.exit.close()
    original(runner)


REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    "_update_states": _update_states,
    "_input_fits_in_drafter": _input_fits_in_drafter,
    "_get_spec_decode_draft_probs": _draft_probs,
    "_setup_eagle3_aux_hidden_state_outputs": _set_up_hidden_states,
    "propose_draft_token_ids": _propose,
    "_sample": _sample,
    "shutdown": _shut_down,
}


def _expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """vLLM's own on a CPU writes a float result into a copy and returns memory as it was: temperatures of chance."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def _apply_sampling_constraints(original: Callable[..., Tensor], logits: Tensor, *others: Any) -> Tensor:
    """A step without a draft has no row to filter, and vLLM's top-k on a CPU then asks for the maximum of nothing."""
    return original(logits, *others) if len(logits) else logits
