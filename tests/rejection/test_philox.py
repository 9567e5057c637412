"""Random numbers: the published known answers, and streams that cannot collide."""

from __future__ import annotations

import pytest
import torch

from specdec.core.kernels import philox as naive
from specdec.core.kernels.cuda import draft_uniforms as kernel
from specdec.core.kernels.philox import FEW, Stream, draft_key, philox, philox_block, uniform
from specdec.core.proposing.views import StepRandom

from .interpreted import DEVICE

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = [  # kat_vectors of the Random123 distribution, philox4x32 10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert philox_block(counter, key) == words
    assert philox(torch.tensor(counter).view(4, 1), torch.tensor(key).view(2, 1)).flatten().tolist() == list(words)


def test_tensors_and_integers_agree() -> None:
    g = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (4, 1024), generator=g)
    keys = torch.randint(0, 2**32, (2, 1024), generator=g)
    words = philox(counters, keys).T.tolist()
    blocks = zip(counters.T.tolist(), keys.T.tolist(), strict=True)
    assert words == [list(philox_block(tuple(c), tuple(k))) for c, k in blocks]


def test_few_and_many_draws_agree_beyond_32_bits_and_below_zero() -> None:
    seeds = torch.arange(-FEW, FEW) * (2**40 + 1)
    positions = torch.arange(2 * FEW) * (2**33 + 5)
    many = uniform(seeds, positions, Stream.ACCEPT, 3)
    few = [uniform(seeds[i : i + 1], positions[i : i + 1], Stream.ACCEPT, 3) for i in range(2 * FEW)]
    assert torch.equal(many, torch.cat(few))


def test_arguments_broadcast() -> None:
    seeds, positions = torch.tensor([[5], [-6]]), torch.arange(3)
    streams = torch.tensor([1, 2]).view(2, 1, 1)
    grid = uniform(seeds, positions, streams)
    assert grid.shape == (2, 2, 3)
    assert grid[1, 0, 2] == uniform(torch.tensor(5), torch.tensor(2), Stream.RESAMPLE)


def test_uniforms_lie_on_midpoints_inside_the_unit_interval() -> None:
    u = uniform(torch.tensor(1), torch.arange(20_000), Stream.RESAMPLE)
    cells = u * 2.0**52 - 0.5
    assert u.dtype == torch.float64
    assert torch.equal(cells, cells.round())
    assert 0 < float(u.min()) < 1e-3
    assert 1 - 1e-3 < float(u.max()) <= 1 - 2.0**-53
    assert abs(float(u.mean()) - 0.5) < 4 / (12 * 20_000) ** 0.5


def test_every_field_changes_the_number() -> None:
    base = {"seed": torch.tensor(3), "position": torch.tensor(9), "stream": 1, "step": 0}
    numbers = [float(uniform(**{**base, name: base[name] + 1})) for name in base]
    far = [float(uniform(**{**base, name: base[name] + 2**32})) for name in ("seed", "position")]
    assert len({float(uniform(**base)), *numbers, *far}) == 1 + len(numbers) + len(far)


def test_draft_key_is_a_different_key_and_depends_on_the_whole_seed() -> None:
    seeds = torch.tensor([0, 1, -1, 2**32, 2**62])
    keys = draft_key(seeds)
    assert keys.shape == seeds.shape
    assert len({*keys.tolist(), *seeds.tolist()}) == 2 * len(seeds)
    assert torch.equal(keys[2], draft_key(torch.tensor(-1)))


def test_draft_keys_of_few_and_many_seeds_agree() -> None:
    seeds = torch.arange(-FEW, FEW) * (2**50 + 7)
    assert draft_key(seeds).tolist() == [int(draft_key(seed)) for seed in seeds]


@pytest.mark.parametrize("num_requests", [1, 3, 130])
def test_the_kernel_draws_the_numbers_of_a_draft_to_the_bit(num_requests: int) -> None:
    keys = torch.arange(num_requests, device=DEVICE) * (2**55 + 3) + 7
    positions = torch.arange(num_requests, device=DEVICE) * (2**33 + 5)
    drawn = kernel.draft_uniforms(keys, positions, 3)
    assert torch.equal(drawn, naive.draft_uniforms(keys, positions, 3))
    for index in range(3):
        assert torch.equal(drawn[index], uniform(keys, positions, Stream.DRAFT, index))


def test_a_step_draws_the_same_numbers_one_by_one_and_beyond_its_draft() -> None:
    keys, positions = torch.tensor([5, 2**62 + 1]), torch.tensor([9, 2**34])
    random = StepRandom(keys, positions, num_draft_tokens=3)
    for index in (4, 0, 2, 1):
        assert torch.equal(random.uniform(index), uniform(keys, positions, Stream.DRAFT, index))
