"""Key-value storage of a draft network's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field

from ..config import Extension
from ..errors import Refusal

if TYPE_CHECKING:
    from torch import Tensor

AttentionMode = Literal["causal", "causal_block", "full_block"]
"""Which keys a query sees.

causal: keys up to its own position. A sliding window counts back from the query.
causal_block: keys up to its own position. A sliding window counts back from the pass's first position.
full_block: all keys of the request's pass. A sliding window counts back from the pass's first position.
"""


class DraftKV(Extension):
    """Keys and values of the proposer's own, on the target's block tables and within its memory budget.

    `Services.draft_kv` is where they lie.
    """

    name: ClassVar[str] = "draft_kv"
    version: ClassVar[int] = 1

    num_layers: int = Field(ge=1, description="attention layers that keep keys and values")
    num_heads: int = Field(ge=1, description="key-value heads")
    head_dim: int = Field(ge=1, description="size of a key")
    value_head_dim: int | None = Field(default=None, ge=1, description="size of a value. None means head_dim")
    dtype: str | None = Field(default=None, description="torch dtype name. None means the target's")
    lookahead: int = Field(default=1, ge=1, description="positions past the newest token that one draft pass writes")
    depends_on_next_token: bool = Field(
        default=False, description="a token's KV is computed from the token that follows it"
    )

    def united(self, other: Self) -> Self:
        """Raises Refusal: an engine keeps one draft KV."""
        layers = f"{self.num_layers} and {other.num_layers} layers"
        raise Refusal(f"two parts keep draft KV ({layers})", "at most one such part")


class DraftKVStore(Protocol):
    """Draft KV addressed by (slot, position), on the target's KV blocks. A rejected position is overwritten later."""

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, heads, head_dim] of the tokens at (slots [N], positions [N])."""
        ...

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, heads, head_dim] of positions 0 .. length-1 of one slot."""
        ...

    def attention(
        self,
        slots: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        mode: AttentionMode = "causal",
        parents: Tensor | None = None,
    ) -> Mapping[str, Any]:
        """Keyword arguments for the attention of a network built by these services, for one pass over it.

        The pass has one input per query. It stores their keys and values, and each query attends to its slot from
        position 0 on. One call serves any number of layers.

        slots: the slot of each request, [B].
        starts: the position of each request's first query, [B].
        cu_queries: request b has the queries `cu_queries[b] : cu_queries[b+1]`, [B+1].
        mode: which keys a query sees.
        parents: of the nodes of trees, [B, n]. Nodes lie behind each other, and the queries are the last of them. Each
            sees what lies before the first node, and its own path. None means no trees.
        """
        ...


class DraftKVServices(Protocol):
    """The methods of `Services` for draft KV."""

    def draft_kv(self) -> DraftKVStore:
        """The store of what `DraftKV` asked for. Raises Refusal if it was not asked for."""
        ...
