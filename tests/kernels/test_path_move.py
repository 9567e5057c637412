"""Keys and values of accepted nodes move to where a chain has them, in one launch for tensors of all sizes."""

from __future__ import annotations

import torch
from paged_inputs import DEVICE

from specdec.core.kernels import trees as naive
from specdec.core.kernels.cuda import path_move as kernel
from specdec.core.kernels.trees import Paths

BLOCK_SIZE = 4
PLACES = [[0, 1, 2, 3], [0, 2, 5, 6], [0, 6, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]
"""A chain, a path through all the tree, one node, nothing, and a request without rows."""
FIRST = [3, 6, 1, 9, 0]
MOST = 20


def given():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(len(PLACES) * MOST // BLOCK_SIZE, generator=generator).int()
    paths = Paths(torch.tensor(PLACES), torch.tensor(FIRST), blocks.view(len(PLACES), -1), BLOCK_SIZE)
    paths = Paths(paths.places.to(DEVICE), paths.first.to(DEVICE), paths.block_table.to(DEVICE), BLOCK_SIZE)
    shapes = [(2, 3), (1, 700)]
    stored = [torch.randn(len(PLACES) * MOST, *shape, generator=generator).to(DEVICE) for shape in shapes]
    return [*stored, stored[0].bfloat16()], paths


def table_of(stored):
    rows = [[each.data_ptr(), each[0].numel() * each.itemsize] for each in stored]
    return torch.tensor(rows, device=DEVICE)


def test_a_path_lies_as_a_chain_does_and_nothing_else_moves():
    stored, paths = given()
    for move in (naive.move_paths, kernel.move_paths):
        moved = [each.clone() for each in stored]
        move(moved, table_of(moved), paths)
        for before, after in zip(stored, moved, strict=True):
            expected = before.clone()
            for places, first, blocks in zip(PLACES, FIRST, paths.block_table.tolist(), strict=True):
                slots = [block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)]
                for depth, place in enumerate(places):
                    if place > 0:
                        expected[slots[first + depth - 1]] = before[slots[first + place - 1]]
            assert torch.equal(after, expected)
