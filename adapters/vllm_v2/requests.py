"""What a worker knows of vLLM's requests, from what the scheduler told it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Running:
    """One request that vLLM has not finished."""

    prompt_token_ids: list[int]
    sampling_params: Any
    mm_features: list[Any]  # images and sounds in the prompt
    blocks: list[int] = field(default_factory=list)  # of vLLM's cache, in the group of the draft layers
    drafts: list[int] = field(default_factory=list)  # that its next step verifies


WARM_UP = "_warmup_", "_v2_mixed_warmup"
"""What ids of the requests begin with that vLLM makes up at its start."""


class Requests(dict[str, Running]):
    """The requests that run, by id. `group`: vLLM's cache group that has the draft layers. None means that there are
    none.
    """

    group: int | None = None

    def with_next_turn(self, news: Iterable[Any]) -> list[str]:
        """Sessions whose next input came: vLLM keeps the id, and what was said before is part of the prompt."""
        known = [new for new in news if new.req_id in self]
        return [new.req_id for new in known if new.prompt_len > len(self[new.req_id].prompt_token_ids)]

    def add(self, news: Iterable[Any]) -> None:
        """Requests that are new to the runner, or come back after preemption, with their blocks from the first on."""
        for new in news:
            known = self.get(new.req_id)
            if known is None:
                prompt = list(new.prefill_token_ids[: new.prompt_len])
                known = self[new.req_id] = Running(prompt, new.sampling_params, new.mm_features)
            if self.group is not None:
                known.blocks[:] = new.block_ids[self.group]

    def extend(self, cached: Any) -> None:
        """vLLM's CachedRequestData: blocks that running requests got."""
        if self.group is not None:
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if blocks is not None and request_id in self:
                    self[request_id].blocks.extend(blocks[self.group])

    def end(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Forget finished requests, and the drafts of preempted ones, which come back."""
        for request_id in preempted:
            self[request_id].drafts.clear()
        for request_id in finished:
            self.pop(request_id, None)
