"""The fixed places that a captured pass of a target reads its inputs from."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...model.target import ForwardInput
from ..attention_spec import TreeRows
from .buckets import Bucket
from .capture import fill_together
from .paged_view import PagedView


class StaticInputs:
    """The places that a captured forward pass reads, as large as the largest needs; smaller ones use the front."""

    def __init__(
        self, largest: Bucket, max_requests: int, pad_row: int, device: torch.device, num_nodes: int = 0
    ) -> None:
        """num_nodes: the most of a tree; 0: no pass has one."""
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        self.token_ids = integers(largest.num_tokens)
        self.positions = integers(largest.num_tokens)
        self.logits_rows = integers(largest.num_rows)
        self.rows = integers(max_requests)
        self.starts = integers(max_requests)
        self.cu_queries = integers(max_requests + 1)
        self._zeros = integers(max(largest.num_tokens, max_requests))
        self._pad_rows = torch.full_like(self.rows, pad_row)
        self.rows.fill_(pad_row)
        self._no_nodes = TreeRows(torch.full_like(self.rows[:, None].expand(-1, num_nodes), -1), integers(max_requests))
        self.tree = TreeRows(self._no_nodes.parents.clone(), integers(max_requests))

    def trees_of(self, bucket: Bucket) -> TreeRows | None:
        """Where the trees of a captured pass are; None: it has none."""
        if bucket.num_queries == 1 or not self.tree.parents.shape[1]:
            return None
        return TreeRows(self.tree.parents[: bucket.num_requests], self.tree.num_nodes[: bucket.num_requests])

    def _trees(self, view: PagedView, bucket: Bucket) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The tensors of trees as `load` takes them: place, what is given, padding. A pass without nodes has none in
        any request.
        """
        place = self.trees_of(bucket)
        if place is None:
            return []
        given, none = view.tree or TreeRows(self.tree.parents[:0], self.tree.num_nodes[:0]), self._no_nodes
        width = given.parents.shape[1]
        return [
            (place.parents[:, :width], given.parents, none.parents[:, :width]),
            (place.num_nodes, given.num_nodes, none.num_nodes),
        ]

    def load(self, batch: ForwardInput, view: PagedView, bucket: Bucket) -> None:
        """Put a batch in. Padding requests have no tokens and the pad row; tokens of nobody go to the pad block."""
        count, requests = bucket.num_tokens, bucket.num_requests
        fill_together(
            (
                (self.token_ids[:count], batch.token_ids, self._zeros),
                (self.positions[:count], batch.positions, self._zeros),
                (self.logits_rows[: bucket.num_rows], batch.logits_rows, self._zeros),
                (self.rows[:requests], view.rows, self._pad_rows),
                (self.starts[:requests], view.starts, self._zeros),
                (self.cu_queries[: len(view.cu_queries)], view.cu_queries, self._zeros),
                *self._trees(view, bucket),
            )
        )
        if len(view.cu_queries) <= requests:
            self.cu_queries[len(view.cu_queries) : requests + 1].fill_(len(batch.token_ids))
