"""PARD (https://arxiv.org/abs/2504.18583): a language model that drafts a whole block with rows of one mask token.

The rows of the mask follow the newest token. Each sees the text up to that token and the rows of the mask before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

NUM_DRAFTS = 7
NUM_MASKS = NUM_DRAFTS - 1


def logits_with_blocks(model: Any, ids: Tensor, mask_id: int, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] of a text's own rows, and [B, M, NUM_MASKS, V] of rows of the mask behind each of M anchors.

    `ids` [B, T]; `anchors` [M]: the positions of the newest known tokens. Blocks do not see each other.
    """
    length, count = ids.shape[1], len(anchors)
    masks = ids.new_full((len(ids), count * NUM_MASKS), mask_id)
    behind = (anchors[:, None] + 1 + torch.arange(NUM_MASKS)).flatten()
    positions = torch.cat([torch.arange(length), behind])
    output = model(
        input_ids=torch.cat([ids, masks], dim=1),
        position_ids=positions[None],
        attention_mask=_visible(length, anchors)[None, None],
        use_cache=False,
    )
    own, blocks = output.logits.split([length, count * NUM_MASKS], dim=1)
    return own, blocks.unflatten(1, (count, NUM_MASKS))


def _visible(length: int, anchors: Tensor) -> Tensor:
    """What each row sees, as numbers to add to attention scores: [T + M * NUM_MASKS, T + M * NUM_MASKS]."""
    text = torch.ones(length, length).tril().bool()
    known = (torch.arange(length) <= anchors[:, None]).repeat_interleave(NUM_MASKS, dim=0)
    blocks = torch.block_diag(*[torch.ones(NUM_MASKS, NUM_MASKS).tril()] * len(anchors)).bool()
    seen = torch.cat([pad(text, (0, len(blocks))), torch.cat([known, blocks], dim=1)])
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@torch.no_grad()
def draft_in_parallel(model: Any, known: Tensor, mask_id: int) -> Tensor:
    """The likeliest drafts [B, NUM_DRAFTS] after `known` [B, n], in one pass."""
    ids = pad(known, (0, NUM_MASKS), value=mask_id)
    return model(input_ids=ids, use_cache=False, logits_to_keep=NUM_DRAFTS).logits.argmax(-1)
