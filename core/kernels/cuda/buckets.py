"""The shapes of steps that are captured."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

MOST_TOKENS = 512  # of a captured pass: a larger one takes longer than its launches


def batch_sizes(most: int) -> list[int]:
    """The numbers that work is captured for, up to `most`: at most a quarter of what is computed is padding."""
    sizes = [1]
    while sizes[-1] < most:
        size = (sizes[-1] + 1) * 4 // 3
        sizes.append(min(most, size - size % (1 if size < 8 else 4 if size < 32 else 8)))
    return sizes


@dataclass(frozen=True)
class Bucket:
    """A shape of a step: so many requests and tokens, with so many tokens in one request at most."""

    num_requests: int
    num_tokens: int
    num_queries: int
    num_rows: int  # of logits
    num_reread: int = 0  # inputs that each request's layers with a state read again

    def holds(self, num_requests: int, num_tokens: int, num_queries: int, num_reread: int | None) -> bool:
        """Whether there is room for a pass. num_reread: of each of its requests, which are then equal.

        None: the target keeps no states. With states only a request alone is given drafts that it has not.
        """
        if self.num_requests < num_requests or self.num_tokens < num_tokens or self.num_queries < num_queries:
            return False
        is_room = num_reread is None or self.num_requests == 1 or self.num_queries == num_queries
        return is_room and (num_reread or 0) == self.num_reread


def buckets(max_requests: int, num_draft_tokens: int, max_tokens: int = MOST_TOKENS) -> list[Bucket]:
    """Decoding, verification, and prompts beside both, the largest first: what it needs of the shared memory the others
    fit into. max_tokens: of any step.
    """
    most, width = min(max_tokens, MOST_TOKENS), num_draft_tokens + 1
    asked = [(size, 1) for size in batch_sizes(min(max_requests, most))]
    asked += [(size, min(size, width)) for size in batch_sizes(min(max_requests * width, most))]
    asked += [(size, size) for size in batch_sizes(most)]
    shapes = {
        Bucket(min(size, max_requests), size, queries, min(size, max_requests * width))
        for size, queries in asked
        if size <= max_requests * queries
    }
    return _largest_first(shapes)


def stateful_buckets(max_requests: int, num_draft_tokens: int, max_tokens: int = MOST_TOKENS) -> list[Bucket]:
    """Buckets for a target whose layers keep a state: plain steps, and one request after any number of
    accepted drafts.
    """
    width = num_draft_tokens + 1
    alone = [Bucket(1, width, width, width, replayed) for replayed in range(width)]
    plain = [Bucket(size, size, 1, size) for size in batch_sizes(min(max_requests, max_tokens, MOST_TOKENS))]
    return _largest_first({*plain, *alone})


def _largest_first(shapes: Set[Bucket]) -> list[Bucket]:
    return sorted(shapes, key=lambda bucket: (bucket.num_tokens, bucket.num_queries), reverse=True)
