"""The shapes of steps that are captured."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 512  # of a captured pass: a larger one takes longer than its launches


def batch_sizes(most: int) -> list[int]:
    """The numbers of requests that work is captured for: 1, 2, 4, the multiples of 8, and the most there can be."""
    return [*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most]


@dataclass(frozen=True)
class Bucket:
    """A shape of a step: so many requests with at most so many tokens each."""

    num_requests: int
    num_queries: int
    num_reread: int = 0  # inputs that each request's layers with a state read again

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.num_queries

    def holds(self, num_requests: int, num_queries: int, num_reread: int | None) -> bool:
        """Whether there is room for a pass. num_reread: of each of its requests, which are then equal.

        None: the target keeps no states. With states only a request alone is given drafts that it has not.
        """
        if self.num_queries < num_queries or self.num_requests < num_requests:
            return False
        is_room = num_reread is None or self.num_requests == 1 or self.num_queries == num_queries
        return is_room and (num_reread or 0) == self.num_reread


def buckets(max_requests: int, num_draft_tokens: int) -> list[Bucket]:
    """Decoding and verification, the largest first: what it needs of the shared memory the others fit into."""
    shapes = [Bucket(size, n) for size in batch_sizes(max_requests) for n in {1, num_draft_tokens + 1}]
    small = [bucket for bucket in shapes if bucket.num_tokens <= MOST_TOKENS]
    return sorted(small, key=lambda bucket: (bucket.num_tokens, bucket.num_requests), reverse=True)


def stateful_buckets(max_requests: int, num_draft_tokens: int) -> list[Bucket]:
    """Buckets for a target whose layers keep a state: plain steps, and one request after any number of
    accepted drafts.
    """
    alone = [Bucket(1, num_draft_tokens + 1, replayed) for replayed in range(num_draft_tokens + 1)]
    plain = [bucket for bucket in buckets(max_requests, 0) if bucket not in alone]
    return sorted([*plain, *alone], key=lambda bucket: (bucket.num_tokens, bucket.num_requests), reverse=True)
