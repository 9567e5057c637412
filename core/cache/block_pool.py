"""Which requests use which blocks of the KV cache, and which texts are there. Host bookkeeping only; no tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count

from specdec.sdk.errors import IntegrityError

_FREE, _USED = b"\x01", b"\x00"
_GAP = re.compile(_FREE + b"+")

Key = tuple[str | int, tuple[int, ...]]
"""What stands before a block, and its tokens. Before a text's first block that is a namespace, else a number."""


class KnownBlocks:
    """A dictionary by tokens, so that nothing collides. Full blocks alone are in it, and nobody writes to them again.

    A block's number stands for all tokens up to its end, in a namespace. It is given once, and to nothing else.
    """

    def __init__(self, block_size: int, num_behind: int = 0, *, learns_at_ends: bool = True) -> None:
        """num_behind: tokens behind a block that are part of its key: 1 where draft KV depends on the next token.
        learns_at_ends: whether a request's last step counts. A proposer with draft KV is not shown it.
        """
        self._size = block_size
        self._reach = block_size + num_behind
        self.learns_at_ends = learns_at_ends
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # of the blocks in `_blocks`
        self._numbers: dict[int, int] = {}  # of these, and of others with a text that one of these has
        self._next_number = count()

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, namespace: str, token_ids: Sequence[int]) -> list[int]:
        """The blocks of a text's first tokens, as far as they are known. At least its last token is in none of them."""
        found: list[int] = []
        before: str | int = namespace
        for first in range(0, len(token_ids) - self._size, self._size):
            block = self._blocks.get((before, tuple(token_ids[first : first + self._reach])))
            if block is None:
                break
            found.append(block)
            before = self._numbers[block]
        return found

    def learn(self, blocks: Sequence[int], namespace: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Take in the full blocks of a text, of which so many tokens are computed, and one more token is known."""
        stop = first = num_computed // self._size
        while first and blocks[first - 1] not in self._numbers:
            first -= 1
        for index in range(first, stop):
            before = self._numbers[blocks[index - 1]] if index else namespace
            start, block = index * self._size, blocks[index]
            key = before, tuple(token_ids[start : start + self._reach])
            known = self._blocks.setdefault(key, block)
            if known == block:
                self._keys[block], self._numbers[block] = key, next(self._next_number)
            else:  # computed twice, side by side
                self._numbers[block] = self._numbers[known]

    def forget(self, block: int) -> None:
        """The block is to hold something else."""
        self._numbers.pop(block, None)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def forget_all(self) -> None:
        """No text finds a block any more. What is appended to those in use is not found either."""
        self._blocks.clear()
        self._keys.clear()
        self._numbers = {block: next(self._next_number) for block in self._numbers}


class BlockPool:
    """Hands out blocks, keeping those of one request adjacent while there is room.

    Adjacent blocks let the CPU read a request's KV as a view, in one go. So the pool is divided into regions, each for
    one request at full length, and a new run starts in the first region that is all free. Where there is none it
    starts in the largest gap: in its middle if another request's run ends where the gap begins, so that both can grow.

    Several requests may use a block whose text is known. Where nobody uses it any more it is idle: it can be found
    again until its place is needed. The block that was idle longest is taken first, a text's last one before others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        region_size: int | None = None,
        null_block: int | None = None,
        known: KnownBlocks | None = None,
    ) -> None:
        """`region_size`: blocks of the longest request; None: no regions. `null_block`: one of these that an engine
        gives to nobody; None: a cache that needs such a block has one more. `known`: those that are found again; None:
        no block is.
        """
        self.known = known
        self.null_block = null_block
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._region_size = region_size or num_blocks + 1
        self.num_free = num_blocks  # idle ones among them
        self._free = bytearray(_FREE * num_blocks)  # those that hold nothing
        self._idle: dict[int, None] = {}  # those whose text is known, idle for longest first
        self._num_users = [0] * num_blocks

    def find(self, namespace: str, token_ids: Sequence[int]) -> list[int]:
        """The blocks of a text's first tokens that are known, for `share`. None of them holds its last token."""
        return [] if self.known is None else self.known.find(namespace, token_ids)

    def can_extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Whether `extend` would succeed, for blocks that were found behind `share`."""
        num_idle = sum([not self._num_users[block] for block in blocks])
        return -(-num_tokens // self.block_size) - len(blocks) <= self.num_free - num_idle

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Append blocks to a request's list until it holds `num_tokens`. False, and nothing, where too few are free."""
        num_missing = -(-num_tokens // self.block_size) - len(blocks)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing - (self.num_free - len(self._idle))):
            self._empty(next(iter(self._idle)))
        for _ in range(num_missing):
            block = blocks[-1] + 1 if blocks else self.num_blocks
            if block >= self.num_blocks or not self._free[block]:
                block = self._start_of_new_run()
            self._free[block] = _USED[0]
            self._num_users[block] = 1
            self.num_free -= 1
            blocks.append(block)
        return True

    def share(self, blocks: Sequence[int]) -> None:
        """One request more uses these, which were found."""
        for block in blocks:
            if not self._num_users[block]:
                del self._idle[block]
                self.num_free -= 1
            self._num_users[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Take all blocks of a request back and empty its list. Those that others use stay theirs."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            self.num_free += 1
            self._idle[block] = None
            if self.known is None or block not in self.known:
                self._empty(block)
        blocks.clear()

    def forget_all(self) -> None:
        """Find no block again that is known now."""
        if self.known is not None:
            self.known.forget_all()
        for block in list(self._idle):
            self._empty(block)

    def _empty(self, block: int) -> None:
        """An idle block holds nothing from now on."""
        del self._idle[block]
        self._free[block] = _FREE[0]
        if self.known is not None:
            self.known.forget(block)

    def _start_of_new_run(self) -> int:
        size = self._region_size
        for start in range(0, self.num_blocks - size + 1, size):
            if self._free.find(_USED, start, start + size) < 0:
                return start
        gap = max(_GAP.finditer(self._free), key=lambda gap: gap.end() - gap.start())
        return (gap.start() + gap.end()) // 2 if gap.start() > 0 else 0

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Raise IntegrityError unless every block is empty, idle or owned, by as many as it is counted to have.

        Callable between any two steps.
        """
        num_owners, every = Counter(chain.from_iterable(owned)), range(self.num_blocks)
        empty = [block for block in every if self._free[block]]
        findable = [block for block in every if self.known is not None and block in self.known]
        consistent = (
            sorted([*num_owners, *self._idle, *empty]) == list(every)
            and [num_owners[block] for block in every] == self._num_users
            and self.num_free == self.num_blocks - len(num_owners)
            and self._idle.keys() <= set(findable) <= {*num_owners, *self._idle}
        )
        if not consistent:
            raise IntegrityError(
                "SD-E901",
                "the KV block pool is inconsistent",
                {
                    "owned": f"{num_owners.total()} ({len(num_owners)} distinct)",
                    "idle and empty": f"{len(self._idle)} and {len(empty)}",
                    "counted used": self.num_blocks - self.num_free,
                },
            )
