"""Philox-4x32-10 (Salmon et al., SC 2011), and the uniforms drawn from it.

A uniform is a pure function of (seed, position, stream, step). There is no state to save, so it does not
depend on the batch, the device or the backend, and two purposes with different streams share no number.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from itertools import repeat

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LOW_32_BITS = 0xFFFFFFFF
FEW = 32  # up to here Python's integers beat the fixed cost of some eighty tensor calls


class Stream(IntEnum):
    """What a random number is for; the third word of the counter."""

    ACCEPT = 1
    RESAMPLE = 2
    DRAFT = 3
    TYPICAL = 4
    DRAFT_KEY = 5


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Encrypt one 128-bit counter under a 64-bit key; words of 32 bits, the least significant first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & LOW_32_BITS,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & LOW_32_BITS,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & LOW_32_BITS, (k1 + KEY_INCREMENTS[1]) & LOW_32_BITS
    return c0, c1, c2, c3


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """`philox_block` for N counters at once: int64 words [4, N] and [2, N] give int64 words [4, N]."""
    device = counter.device
    multipliers = _pair(*MULTIPLIERS, device)
    rounds = torch.arange(NUM_ROUNDS, device=device).view(-1, 1, 1)
    round_keys = (key + rounds * _pair(*KEY_INCREMENTS, device)).bitwise_and_(LOW_32_BITS)  # [10, 2, N]
    even, odd = counter[0::2], counter[1::2]
    for round_key in round_keys:
        product = (even * multipliers).flip(0)  # wraps modulo 2^64, which keeps every bit
        even = (product >> 32).bitwise_and_(LOW_32_BITS).bitwise_xor_(odd).bitwise_xor_(round_key)
        odd = product.bitwise_and_(LOW_32_BITS)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _pair(first: int, second: int, device: torch.device) -> Tensor:
    """Two constants, int64 [2, 1], made on the device: a copy from the host would wait for it."""
    return torch.arange(2, device=device).unsqueeze(1) * (second - first) + first


def uniform(seed: Tensor, position: Tensor, stream: Tensor | int, step: Tensor | int = 0) -> Tensor:
    """Uniforms in (0, 1) on the grid of midpoints of 2^52 cells: never 0, at most 1 - 2^-53.

    seed, position, stream and step are integers that broadcast; position is the absolute index of the token
    the number is for. Returns float64 of the broadcast shape.
    """
    cells = _random_bits(seed, position, stream, step, 52)
    return (cells.double() + 0.5) * 2.0**-52


def draft_uniforms(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """The uniforms of a step's drafts, all of them at once: float64 [count, B], row i for draft tokens at index i.

    keys, positions: int64 [B], as `draft_key` gives the first. They are the same on every device, bit for bit.
    """
    steps = torch.arange(count, device=keys.device).unsqueeze(1)
    return uniform(keys, positions, Stream.DRAFT, steps)


def draft_key(seed: Tensor) -> Tensor:
    """The key of a request's draft stream, int64 of the shape of seed.

    A drafter is given this instead of the seed, so that it does not draw the verifier's uniforms by mistake. It is no
    secret: a small seed is found from it by trying all small seeds.
    """
    return _random_bits(seed, torch.zeros_like(seed), Stream.DRAFT_KEY, 0, 63)


def _random_bits(seed: Tensor, position: Tensor, stream: Tensor | int, step: Tensor | int, bits: int) -> Tensor:
    """The leading bits, at most 63, of the random block of each broadcast (seed, position, stream, step)."""
    sources = (position, stream, step, seed)
    shape = (position + stream + step + seed).shape
    if seed.device.type == "cpu" and shape.numel() <= FEW:
        counters = zip(*(_integers(source, shape) for source in sources), strict=True)
        return torch.tensor([_block(*counter) >> (64 - bits) for counter in counters]).view(shape)
    at, use, turn, key = (_on_device(source, seed.device).expand(shape).reshape(-1) for source in sources)
    fields = torch.stack((at, at >> 32, use, turn, key, key >> 32)).bitwise_and_(LOW_32_BITS)
    words = philox(fields[:4], fields[4:])
    return ((words[0] << (bits - 32)) | (words[1] >> (64 - bits))).view(shape)


def _on_device(source: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(source, int):
        return torch.full((), source, dtype=torch.int64, device=device)  # a copy from the host would wait for it
    return source.to(device, torch.int64)


def _integers(source: Tensor | int, shape: torch.Size) -> Iterable[int]:
    if isinstance(source, int):
        return repeat(source, shape.numel())
    return source.expand(shape).flatten().tolist()


def _block(position: int, stream: int, step: int, seed: int) -> int:
    """The first 64 random bits, the first word leading."""
    counter = (position & LOW_32_BITS, position >> 32 & LOW_32_BITS, stream, step)
    words = philox_block(counter, (seed & LOW_32_BITS, seed >> 32 & LOW_32_BITS))
    return words[0] << 32 | words[1]
