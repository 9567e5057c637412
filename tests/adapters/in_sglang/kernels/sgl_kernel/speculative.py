"""What SGLang makes of a tree's mask before it verifies the tree."""

from __future__ import annotations

from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch_size: int,
    width: int,
) -> None:
    """tree_mask [B * D * D]: whether node j is an ancestor of node i, or the node itself. The others are written."""
    masks = tree_mask[: batch_size * width * width].view(batch_size, width, width).tolist()
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for b, mask in enumerate(masks):
        last_child: dict[int, int] = {}
        for i, row in enumerate(mask):
            ancestors = [j for j in range(i) if row[j]]
            positions[b * width + i] = int(lengths[b]) + len(ancestors)
            index[b, i] = b * width + i
            if not ancestors:
                continue
            parent = ancestors[-1]
            if parent in last_child:
                next_sibling[b, last_child[parent]] = i
            else:
                next_token[b, parent] = i
            last_child[parent] = i
