"""What the engine provides to a model-based proposer, which never touches the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .types import TargetInfo


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """How a draft network runs. None means the target's setting."""

    dtype: str | None = None  # torch dtype name
    moe_backend: str | None = None  # experts implementation; "auto" means transformers' default
    quantization: str | None = None  # None means that the weights stay as the checkpoint stores them
    trust_remote_code: bool = False


AttentionMode = Literal["causal", "causal_block", "full_block"]
"""Which keys a query sees.

causal: keys up to its own position. A sliding window counts back from the query.
causal_block: keys up to its own position. A sliding window counts back from the pass's first position.
full_block: all keys of the request's pass. A sliding window counts back from the pass's first position.
"""


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


class TargetKV(Protocol):
    """The keys and values that the target has cached, by (slot, position). They can be read, and never written.

    Slot and position are those of the step. Positions from `KeptTokens.next_position` on are undefined: rejected drafts
    lie there. Layers with a sliding window keep every position too, and the layer that reads says how many it sees.
    Keys are stored as the target's attention takes them, after its norms and its rotary embedding.
    """

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values [length, heads, head_dim] of positions 0 .. length-1 of one slot."""
        ...

    def attention(self, slots: Tensor, lengths: Tensor, layers: Sequence[int]) -> Mapping[str, Any]:
        """Keyword arguments for the attention of a network built by these services, for one pass that only reads.

        Layer i of the network attends to the target's layer `layers[i]`. Its own keys and values are ignored. Query n
        sees positions 0 .. lengths[n]-1 of slot slots[n]. A layer with a sliding window W sees the last W of them.

        slots, lengths: one entry for each query of the pass, [N].
        layers: each of them declared.
        """
        ...


class TargetLayers(Protocol):
    """Some of the target's own layers, between its embedding and its head.

    They read and write the target's cache. What a pass computes equals what the target would compute there, as far as
    the layers before it ran too. It stays until the target computes the same positions again: the next step computes
    every row from the newest token on in all layers, before anything attends to them.
    """

    def logits(
        self,
        token_ids: Tensor,
        slots: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        wanted: Tensor,
        adapted: Tensor | None = None,
    ) -> Tensor:
        """Run tokens, and return the logits [R, V] of some of them, as the target's head gives them.

        token_ids: of all requests, [M]. Each attends to its slot from position 0 up to itself.
        slots: the slot of each request, [B].
        starts: the position of each request's first token, `KeptTokens.next_position` or later, [B].
        cu_queries: request b has the tokens `cu_queries[b] : cu_queries[b+1]`, [B+1].
        wanted: places among the tokens, [R].
        adapted: tokens that run with the adapter, [M] bool. None means all, if there is an adapter.

        Raises ProposerError SD-E276 for starts before that. On a device nothing waits to look: such a pass begins at
        the newest token instead, and the error follows in the next step.
        """
        ...


class Services(Protocol):
    """What the engine provides from `bind` until `close`, within its calls and on their thread.

    Under tensor parallelism `embed` and `lm_head` are collectives: every rank calls them in the same order, with the
    same shapes.
    """

    @property
    def target(self) -> TargetInfo:
        """The facts that `bind` gets too."""
        ...

    @property
    def device(self) -> torch.device:
        """The target's device."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The target's transformers tokenizer. None means that the engine runs on token ids only."""
        ...

    @property
    def logit_scale(self) -> float:
        """The factor that the target applies to the output of its lm_head."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's input embeddings: [..., H] for [...] int64."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of final hidden states [..., H], without `logit_scale`."""
        ...

    def load_causal_lm(
        self, checkpoint: str | Path, settings: NetworkSettings, tensors: Mapping[str, Tensor] | None = None
    ) -> Any:
        """A transformers causal LM from a checkpoint, ready to run. Its attention uses the draft KV.

        tensors: in the place of the model's parameters of these names. Raises ConfigError SD-E228 if one does not fit.
        None means those of the checkpoint.
        """
        ...

    def build_decoder(self, config: Mapping[str, Any], settings: NetworkSettings) -> Any:
        """A transformers decoder of a configuration: layers, rotary embedding, final norm.

        Its attention uses the draft KV. Its weights are random and its embedding is a stub of one row. Fill in the
        checkpoint's tensors, then call `finish`. Raises Refusal for a configuration that transformers does not know or
        the engine does not serve.
        """
        ...

    def finish(self, network: torch.nn.Module, settings: NetworkSettings) -> None:
        """Make an assembled network ready to run, in place: device, dtype, quantization, weight layout.

        With `torch_compile` its `forward` is traced once for each kind of arguments, so it must be a function of its
        tensors. A branch on a value ends compilation with a warning. `len(x)` in the place of `x.shape[0]` fixes the
        number of rows. An attribute that it sets stays as the trace left it.
        """
        ...

    def load_tensors(self, checkpoint: str | Path, prefixes: Sequence[str] = ("",)) -> dict[str, Tensor]:
        """The tensors of a checkpoint directory whose names start with one of `prefixes`, on the engine's device.

        Reads *.safetensors, else pytorch_model.bin and other *.bin, *.pt (weights only). Raises ConfigError SD-E146 for
        a missing or truncated file.
        """
        ...

    def draft_kv(self) -> DraftKVStore:
        """The store that `Needs.draft_kv` declared. Raises Refusal if none was declared."""
        ...

    def target_kv(self) -> TargetKV:
        """The target's cache, of the layers in `Needs.target_kv`. Raises Refusal if none was declared.

        Take it in `bind`, and read it once there are requests.
        """
        ...

    def target_layers(
        self, layers: Sequence[int], adapter: Mapping[str, torch.nn.Module] | None = None
    ) -> TargetLayers:
        """Layers of the target in their order, as many of those in `Needs.target_layers` as are wanted.

        Take them in `bind`, and run them in `warmup` and once there are requests.

        adapter: what is added to the outputs of linear layers while drafting runs them, by the dotted names of these
            layers in the target's modelling code. Each is a function of the layer's input: [..., in] -> [..., out]
            (`specdec.sdk.model_proposer.LowRank`). The target's own passes never see it. Entries of layers that do not
            run are left aside. None means none.

        Raises Refusal if none was declared, or if the target does not run without its other layers; CheckpointError
        SD-E297 if the adapter does not fit the target.
        """
        ...

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a replayable graph where the device has graphs, the function itself elsewhere.

        Every argument is a tensor with one row per request. So is the result, or each of a tuple of results. Results
        are valid until the next call. Each row must depend only on its own inputs and on tensors that keep their places
        (weights, draft KV). The function may read nothing back to the host. A row may be computed and written more than
        once.
        """
        ...

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled where the engine compiles (`torch_compile`), the function itself elsewhere.

        Its arguments are tensors, None, numbers, strings, and tuples, lists and mappings of these; the mapping of
        `DraftKVStore.attention` is one. It returns tensors, or tuples, lists and dictionaries of them. It is traced
        like a network's `forward` (see `finish`), and may call networks that are compiled on their own.

        Each kind of arguments is compiled when it first comes: other numbers beside the tensors, other structures, and
        sizes of one instead of more. Call it with every kind in `warmup`; `ModelProposer.warmup` does so.
        """
        ...
