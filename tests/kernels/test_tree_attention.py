"""Attention of nodes of trees: a mask gives each node what its path alone gives, in the kernel as in the plain form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_inputs import BLOCK_SIZE, DEVICE, inputs
from triton.runtime.interpreter import InterpreterBuilder

from specdec.core.kernels import attention as naive
from specdec.core.kernels import trees as masks
from specdec.core.kernels.attention import Span, TreeMask, attend_by_span
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.cuda import tree_masks as masks_kernel
from specdec.core.kernels.cuda.paged_attention import LibraryOr, kernel, varlen
from specdec.sdk.trees import depths, path_to

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of 0 / 0 in rows that pad a tile
SPECS = {
    "all": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=4),
    "chunk": AttentionSpec(0.3, chunk=5, softcap=5.0),
}
TREES = [[-1, -1, 0, 0, 2, 1], [], [-1, 0, 1], [-1, -1, -1, 1, 1, 4, 4, 6, 0]]
BEFORE = [(3, 11), (1, 9), (1, 30), (2, 2)]
"""Of each request: queries before its tree, and positions before its tree."""


def random_parents(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-1, i, (count,), generator=generator) for i in range(width)]
    return torch.stack(columns, 1).to(DEVICE)


def tree_inputs(heads="gqa", trees=TREES, before=BEFORE, **settings):
    shapes = [(n + len(tree), t + len(tree)) for (n, t), tree in zip(before, trees, strict=True)]
    *tensors, pages = inputs(shapes, heads=heads, **settings)
    width = max(map(len, trees))
    parents = torch.tensor([[*tree, *[-1] * (width - len(tree))] for tree in trees], device=DEVICE)
    num_nodes = torch.tensor([len(tree) for tree in trees], dtype=torch.int32, device=DEVICE)
    return *tensors, replace(pages, tree=TreeMask(num_nodes, *masks.tree_masks(parents)))


def spans_of(pages, before, trees):
    """A span of one query for each node, whose keys are those of its path; and one for what lies before the tree."""
    cpu, spans, start = torch.device("cpu"), [], 0
    for row, (num_before, root), tree in zip(pages.block_table.cpu(), before, trees, strict=True):
        position = torch.arange(root + len(tree))
        slots = row[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        spans.append(Span(start, num_before, root, slots[:root], cpu))
        for node in range(len(tree)):
            keys = torch.cat([slots[:root], slots[root:][path_to(node, tree)]])
            spans.append(Span(start + num_before + node, 1, len(keys), keys, cpu))
        start += num_before + len(tree)
    return spans


def test_masks_are_the_paths():
    parents = random_parents(5, 64)
    ancestors, found = masks.tree_masks(parents)
    for b, tree in enumerate(parents.tolist()):
        assert found[b].tolist() == depths(tree)
        expected = [sum(1 << each for each in path_to(node, tree)) for node in range(64)]
        assert [each % 2**64 for each in ancestors[b].tolist()] == expected


@pytest.mark.parametrize("width", [1, 5, 64])
def test_one_launch_gives_the_masks(width):
    parents = random_parents(3, width)
    parents[0] = 63  # no earlier node: the root
    for found, expected in zip(masks_kernel.tree_masks(parents), masks.tree_masks(parents), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("heads", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_plain_form_gives_a_node_what_its_path_alone_gives(spec, heads):
    query, keys, values, pages = (each.cpu() if isinstance(each, torch.Tensor) else each for each in tree_inputs(heads))
    found = naive.attend_pages(query, keys, values, pages, spec)
    expected = attend_by_span(query, keys, values, spans_of(pages, BEFORE, TREES), spec)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_kernel_gives_what_the_plain_form_gives(spec, monkeypatch):
    for few in (kernel.FEW_QUERIES, 0):  # keys in parts, and whole
        monkeypatch.setattr(kernel, "FEW_QUERIES", few)
        given = tree_inputs(max_keys=600 if few else 0)
        found, expected = (form.attend_pages(*given, spec) for form in (kernel, naive))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_tree_of_64_nodes_across_tiles_and_ranges(spec):
    trees = [random_parents(1, 64)[0].tolist(), random_parents(1, 30, 1)[0].tolist()]
    given = tree_inputs("mqa", trees, [(1, 250), (1, 3)], block_size=16, max_keys=512)
    found, expected = (form.attend_pages(*given, spec) for form in (kernel, naive))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("spec", ["window", "chunk"])
def test_nothing_is_read_behind_the_depths_of_the_last_tree(spec, monkeypatch):
    *tensors, pages = tree_inputs("mqa", [[-1, 0, 0]], [(1, 9)])
    room = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    room[:3] = pages.tree.depths[0]
    given = *tensors, replace(pages, tree=replace(pages.tree, depths=room[None, :3]))
    behind = range(room.data_ptr() + 3 * 4, room.data_ptr() + room.nbytes)
    load, read = InterpreterBuilder.create_masked_load, []

    def watched(self, places, mask, *others):
        read.extend(each for each in places.data[mask.data].tolist() if each in behind)
        return load(self, places, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    kernel.attend_pages(*given, SPECS[spec])
    assert not read


def test_requests_without_nodes_get_what_they_get_without_a_mask():
    *given, pages = inputs([(1, 9), (3, 7)])
    none = TreeMask(torch.zeros_like(pages.num_keys), *masks.tree_masks(random_parents(2, 4)))
    for form in (kernel, naive):
        found, expected = (form.attend_pages(*given, each, SPECS["all"]) for each in (replace(pages, tree=none), pages))
        assert torch.equal(found, expected)


def test_torchs_own_form_takes_no_trees(monkeypatch):
    monkeypatch.setattr(varlen, "is_served", lambda *kind: True)
    monkeypatch.setattr(varlen, "attend_pages", lambda *given: "the library's")
    *given, pages = tree_inputs()
    attend = LibraryOr("ours", lambda *given: "ours")
    assert attend(*given, pages, SPECS["all"]) == "ours"
    assert attend(*given, replace(pages, tree=None), SPECS["all"]) == "the library's"
