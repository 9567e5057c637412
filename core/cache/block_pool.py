"""Which request owns which blocks of the KV cache. Host bookkeeping only; knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.sdk.errors import IntegrityError

_FREE, _USED = b"\x01", b"\x00"


class BlockPool:
    """Hands out blocks, keeping those of one request adjacent while there is room.

    Adjacent blocks let the CPU read a request's KV as a view, in one go. So the pool is divided into regions, each for
    one request at full length, and a new run starts in the first region that is all free. Where there is none it
    starts in the largest gap: in its middle if another request's run ends where the gap begins, so that both can grow.
    """

    def __init__(
        self, num_blocks: int, block_size: int, region_size: int | None = None, null_block: int | None = None
    ) -> None:
        """`region_size`: blocks of the longest request; None: no regions. `null_block`: one of these that an engine
        gives to nobody; None: a cache that needs such a block has one more.
        """
        self.null_block = null_block
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._region_size = region_size or num_blocks + 1
        self.num_free = num_blocks
        self._free = bytearray(_FREE * num_blocks)

    def can_extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Whether `extend` would succeed."""
        return -(-num_tokens // self.block_size) - len(blocks) <= self.num_free

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Append blocks to a request's list until it holds `num_tokens`. False, and nothing, where too few are free."""
        num_missing = -(-num_tokens // self.block_size) - len(blocks)
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing):
            block = self._next_after(blocks[-1]) if blocks else self._start_of_new_run()
            self._free[block] = _USED[0]
            self.num_free -= 1
            blocks.append(block)
        return True

    def release(self, blocks: list[int]) -> None:
        """Take all blocks of a request back and empty its list."""
        for block in blocks:
            self._free[block] = _FREE[0]
        self.num_free += len(blocks)
        blocks.clear()

    def _next_after(self, block: int) -> int:
        following = block + 1
        if following < self.num_blocks and self._free[following]:
            return following
        return self._start_of_new_run()

    def _start_of_new_run(self) -> int:
        size = self._region_size
        for start in range(0, self.num_blocks - size + 1, size):
            if self._free.find(_USED, start, start + size) < 0:
                return start
        gap = max(self._free.split(_USED), key=len)
        start = self._free.find(gap)
        return start + len(gap) // 2 if start > 0 else start

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Raise IntegrityError unless every block is free or owned exactly once. Callable between any two steps."""
        blocks = [block for run in owned for block in run]
        num_marked_used = self._free.count(_USED)
        consistent = (
            len(set(blocks)) == len(blocks) == num_marked_used == self.num_blocks - self.num_free
            and not any(self._free[block] for block in blocks)
        )  # fmt: skip
        if not consistent:
            raise IntegrityError(
                "SD-E901",
                "the KV block pool is inconsistent",
                {
                    "owned": f"{len(blocks)} ({len(set(blocks))} distinct)",
                    "marked used": num_marked_used,
                    "counted used": self.num_blocks - self.num_free,
                },
            )
