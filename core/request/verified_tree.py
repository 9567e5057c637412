"""What became of one request's tree of drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from specdec.sdk.trees import depths


class VerifiedTree(NamedTuple):
    """Nodes by number, in the order in which they were drawn."""

    nodes: list[int]  # accepted, from the root on
    parents: Sequence[int]  # of all nodes

    @property
    def widths(self) -> list[int]:
        """The number of nodes at each depth."""
        found = Counter(depths(self.parents))
        return [found[depth] for depth in range(1, len(found) + 1)]

    def path_first(self) -> list[int]:
        """All nodes: the accepted path, then what was met at its end, then the others in the order of the draw."""
        end = self.nodes[-1] if self.nodes else -1
        met = [node for node, parent in enumerate(self.parents) if parent == end]
        return list(dict.fromkeys([*self.nodes, *met, *range(len(self.parents))]))

    def shown_parents(self) -> list[int]:
        """The parent of each node of `path_first`, as its place in that list; -1 is the newest token."""
        order = self.path_first()
        place = {node: number for number, node in enumerate(order)}
        return [place.get(self.parents[node], -1) for node in order]
