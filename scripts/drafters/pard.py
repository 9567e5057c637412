"""PARD (https://arxiv.org/abs/2504.18583): a language model that drafts a whole block with rows of one mask token.

The rows of the mask follow the newest token. Each sees the text up to that token and the rows of the mask before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

NUM_DRAFTS = 7
NUM_MASKS = NUM_DRAFTS - 1
KEPT_PER_DEPTH = 0.7  # of the rows at one depth, those that have a row at the next
LEAST_KEPT = 0.2


@dataclass(frozen=True)
class MaskRows:
    """Rows of the mask in training: each stands in the block behind one anchor, the newest known token."""

    anchors: Tensor  # [R] position of the row's anchor
    blocks: Tensor  # [R] index of the row's block
    depths: Tensor  # [R] rows of the mask before it in its block

    @property
    def positions(self) -> Tensor:
        """[R]"""
        return self.anchors + 1 + self.depths


def drop_deeper(anchors: Tensor) -> MaskRows:
    """Blocks behind `anchors` [M], fewer of them at each depth: the paper's conditional drop.

    A block that ends early keeps all rows before its end, because those are what a row sees.
    """
    kept = (KEPT_PER_DEPTH ** torch.arange(NUM_MASKS)).clamp(min=LEAST_KEPT)
    blocks, depths = torch.nonzero(torch.rand(len(anchors), 1) < kept, as_tuple=True)
    return MaskRows(anchors[blocks], blocks, depths)


def logits_with_blocks(model: Any, ids: Tensor, mask_id: int, rows: MaskRows) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] of a text's own rows `ids` [B, T], and [B, R, V] of the rows of the mask."""
    length, count = ids.shape[1], len(rows.depths)
    output = model(
        input_ids=pad(ids, (0, count), value=mask_id),
        position_ids=torch.cat([torch.arange(length), rows.positions])[None],
        attention_mask=_visible(length, rows)[None, None],
        use_cache=False,
    )
    own, masked = output.logits.split([length, count], dim=1)
    return own, masked


def _visible(length: int, rows: MaskRows) -> Tensor:
    """What each row sees, as numbers to add to attention scores: [T + R, T + R]."""
    text = torch.ones(length, length).tril().bool()
    known = torch.arange(length) <= rows.anchors[:, None]
    same_block = rows.blocks[:, None] == rows.blocks
    before = rows.depths[:, None] >= rows.depths
    seen = torch.cat([pad(text, (0, len(known))), torch.cat([known, same_block & before], dim=1)])
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@torch.no_grad()
def draft_in_parallel(model: Any, known: Tensor, mask_id: int) -> Tensor:
    """The likeliest drafts [B, NUM_DRAFTS] after `known` [B, n], in one pass."""
    ids = pad(known, (0, NUM_MASKS), value=mask_id)
    return model(input_ids=ids, use_cache=False, logits_to_keep=NUM_DRAFTS).logits.argmax(-1)
