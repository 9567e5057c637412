"""What tests look at inside an engine: the one place that knows where assembly puts it.

Each takes an `LLM` or its engine.
"""

from __future__ import annotations

from typing import Any

from specdec.core.engine.assembly import Parts


def proposer_of(llm: Any) -> Any:
    """The proposer that drafts."""
    return _parts(llm).host.proposer


def plugin_of(llm: Any) -> Any:
    """Whose the proposer is."""
    return _parts(llm).host.plugin


def host_of(llm: Any) -> Any:
    """The host of the proposer, None without one."""
    return _parts(llm).host


def info_of(llm: Any) -> Any:
    """What proposers are told of the target."""
    return _parts(llm).plan.info


def target_of(llm: Any) -> Any:
    """The target as it was loaded."""
    return _parts(llm).model.target


def served_target_of(llm: Any) -> Any:
    """The target as steps call it: recorded, where the device records."""
    return _parts(llm).runner._target


def addressing_of(llm: Any) -> Any:
    """How steps address KV."""
    return _parts(llm).runner._addressing


def cache_of(llm: Any) -> Any:
    """The keys and values of the target."""
    return _parts(llm).runner._cache


def scheduler_of(llm: Any) -> Any:
    """Who runs and who waits."""
    return _parts(llm).cache.scheduler


def pool_of(llm: Any) -> Any:
    """The blocks of the cache."""
    return _parts(llm).cache.scheduler.pool


def drafts_of(llm: Any) -> Any:
    """The drafts that wait for verification."""
    return _parts(llm).drafts


def text_equality_of(llm: Any) -> Any:
    """What is promised of texts."""
    return _parts(llm).model.text_equality


def threads_of(llm: Any) -> Any:
    """How many threads steps have."""
    return _parts(llm).model.threads


def kv_capacity_of(llm: Any) -> int:
    """How many tokens of one request the cache holds."""
    return _parts(llm).kv_capacity


def verify_with(llm: Any, rule: Any) -> None:
    """Have steps verify their drafts with another rule."""
    _parts(llm).runner._rule = rule


def listen(llm: Any, listener: Any) -> None:
    """Tell a hook plugin what observers are told from now on."""
    _parts(llm).plan.hooks._manager.register(listener)


def _parts(llm: Any) -> Parts:
    return getattr(llm, "engine", llm).parts
