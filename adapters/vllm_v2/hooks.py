"""The methods of vLLM's V2 runner that are wrapped in the worker. Installed once, for the first speculator of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from ..vllm_shared.wrapping import wrap
from .requests import WARM_UP
from .speculator import Speculator


@cache
def install() -> None:
    """Wrap, once, for runners whose speculator is ours."""
    for name, replacement in REPLACEMENTS.items():
        wrap(GPUModelRunner, name, replacement, "speculator", Speculator)


def _load_model(speculator: Speculator, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Not before: while it loads, vLLM would ask the target for the layers of an EAGLE head of its own."""
    original(runner, *args, **kwargs)
    runner.use_aux_hidden_state_outputs = speculator.reads_between


def _finish_requests(speculator: Speculator, original: Callable[..., Any], runner: Any, scheduled: Any) -> Any:
    finished, preempted = scheduled.finished_req_ids, scheduled.preempted_req_ids or set()
    speculator.driver.begin_step(finished, preempted)
    speculator.requests.end(finished, preempted)
    return original(runner, scheduled)


def _add_requests(speculator: Speculator, original: Callable[..., Any], runner: Any, scheduled: Any) -> Any:
    news = [new for new in scheduled.scheduled_new_reqs if not new.req_id.startswith(WARM_UP)]
    ended = speculator.requests.with_next_turn(news)
    speculator.driver.finish(ended)
    speculator.requests.end(ended, ())
    speculator.requests.add(news)
    for new in news:
        speculator.driver.resume(new.req_id, new.prefill_token_ids)
    return original(runner, scheduled)


def _update_requests(speculator: Speculator, original: Callable[..., Any], runner: Any, scheduled: Any) -> Any:
    speculator.requests.extend(scheduled.scheduled_cached_reqs)
    return original(runner, scheduled)


def _initialize_kv_cache(
    speculator: Speculator,
    original: Callable[..., Any],
    runner: Any,
    config: Any,
    is_profiling: bool = False,
    **kw: Any,
) -> Any:
    original(runner, config, is_profiling, **kw)
    if not is_profiling:
        speculator.lay_out()


def _take_draft_token_ids(speculator: Speculator, original: Callable[..., Any], runner: Any) -> DraftTokenIds:
    """Hand vLLM the drafts of the running requests. Without asynchronous scheduling, its scheduler plans exactly these.

    With it, vLLM asks only for drafts of requests with a grammar. It has copied them if nobody else read them.
    """
    if speculator.driver.reads_late:
        return original(runner)
    ids = runner.draft_tokens_handler.req_ids
    running = [speculator.requests.get(each) for each in ids]
    return DraftTokenIds(ids, [list(each.drafts) if each else [] for each in running])


def _shut_down(speculator: Speculator, original: Callable[..., Any], runner: Any) -> None:
    speculator.exit.close()
    original(runner)


REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    "load_model": _load_model,
    "finish_requests": _finish_requests,
    "add_requests": _add_requests,
    "update_requests": _update_requests,
    "initialize_kv_cache": _initialize_kv_cache,
    "take_draft_token_ids": _take_draft_token_ids,
    "shutdown": _shut_down,
}
