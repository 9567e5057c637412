"""The data that crosses between engine and proposer. Each type is a frozen dataclass.

Letters: B requests in the step, K most drafts per request, N tokens shown, L declared hidden states, H hidden size,
V target vocabulary, Vd draft vocabulary, M entries of a sparse draft distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol

from typing_extensions import TypeVar

from .distribution_kind import DistributionKind as DistributionKind
from .token_ids import token_id

if TYPE_CHECKING:
    from torch import Tensor

    from .extensions import RejectedTokens

PADDING_TOKEN_ID = -1
R = TypeVar("R", default=Any)


class Phase(IntEnum):
    """Where a request stands after the step that is shown. Other values may come: compare with `==`."""

    PREFILL = 0  # part of the prompt is still to be computed; no token was sampled
    PREFILL_DONE = 1  # the prompt ended in this step and its first token was sampled
    DECODE = 2


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """Facts of the target model and the engine's limits. They are known before any weight is loaded."""

    model: str
    checkpoint_dir: Path | None  # None means a model object without a checkpoint
    config: Mapping[str, Any]  # the checkpoint's own configuration: JSON, read only
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32", "bfloat16", ...
    device: str  # "cpu", "cuda:0"
    max_model_len: int
    max_num_seqs: int  # the number of slots
    block_size: int
    extensions: frozenset[str] = frozenset()  # ids of those that the engine offers here: "trees@1"
    max_nodes: int = 0  # of a tree


@dataclass(frozen=True, kw_only=True)
class RequestEnd:
    """How a request ended."""

    reason: str  # "stop", "length", "abort" or "error"; unknown values may appear
    output_token_ids: Sequence[int]  # every token of the output; steps have not shown the last of them
    num_drafted: int  # tokens, over the whole request
    num_accepted: int


@dataclass(frozen=True, kw_only=True)
class RequestView(Generic[R]):
    """One request, as a proposer sees it. R is the class's RequestOptions."""

    request_id: str
    slot: int  # below max_num_seqs, its own while it runs
    generation: int  # changes when the slot changes hands or the request is computed again
    prompt_token_ids: Sequence[int]
    options: R = None  # type: ignore[assignment]  # the RequestOptions, made of `extra_args["specdec"]`; None if the class has none
    namespace: str = ""  # requests may share what is learned of them within a namespace only
    end: RequestEnd | None = None  # known in `on_finish` alone


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """Every position whose KV was computed in this step and survived verification, with the token that follows it.

    Request b of the step owns the entries from `token_offsets[b]` on, `num_kept[b]` of them. In the host form these are
    all entries. In the device form those of rejected drafts lie between them. So shapes do not depend on acceptance,
    and nothing waits for the device.
    """

    token_offsets: Tensor  # [B+1] int64
    num_kept: Tensor  # [B] int64
    kept_start: Tensor  # [B] int64, position of the first kept token; see `Needs.whole_prompt`
    positions: Tensor  # [N] int64
    token_ids: Tensor  # [N] int64
    next_token_ids: Tensor  # [N] int64, the token that follows; undefined for rejected ones
    hidden: tuple[Tensor, ...] = ()  # L of [N, H] in the target's dtype, in the order of `Needs.hidden_states`
    most_tokens: int | None = None
    """The most entries of a request; a pass may be padded to it. None means unknown, or that no pass may be padded."""
    top_ids: Tensor | None = None
    """[N, m] int64, the target's most likely tokens after each one, the likeliest first. -1 where no logits are.

    The target computes logits only where a token is sampled or a draft is verified. So tokens of a prompt have none but
    the last. None means that `TargetTokens` was not asked for.
    """
    top_logprobs: Tensor | None = None
    """[N, m] float32, their log-probabilities. -inf where no logits are.

    They belong to the target's own distribution: temperature 1, before bias, penalties and filters.
    """

    @property
    def next_position(self) -> Tensor:
        """The first position of each request that the target has not computed: [B] int64."""
        return self.kept_start + self.num_kept

    @property
    def last(self) -> Tensor:
        """The last kept entry of each request: [B] int64."""
        return self.token_offsets[:-1] + self.num_kept - 1

    def entries(self) -> tuple[Tensor, Tensor]:
        """A kept entry for each of the N entries, and the place of its request: [N] int64 each.

        A rejected entry gives way to the last kept one before it, which is then there twice. So nothing waits for the
        device.
        """
        from .kept_entries import kept_entries

        return kept_entries(self.token_offsets, self.num_kept, self.positions.shape[0])

    def hidden_cat(self, entries: Tensor | None = None) -> Tensor:
        """The hidden states side by side: [N, L*H]. entries: the places [n] of some. None means all.

        Raises IndexError if none were declared.
        """
        import torch

        if not self.hidden:
            raise IndexError("no hidden states are shown: declare them with Needs(hidden_states=...)")
        chosen = self.hidden if entries is None else [state[entries] for state in self.hidden]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


class TokenHistory(Protocol):
    """The tokens of the step's requests, prompt and output, the newest included. What it gives are copies."""

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        """The tokens of one request by its place in the step, from position `start` on. On a device it waits."""
        ...

    def of(self, request: int, start: int = 0) -> Tensor:
        """The same as a tensor: [committed_length - start] int64. On a device it waits for the length."""
        ...

    def tail(self, num_tokens: int) -> Tensor:
        """The last tokens of each request: [B, num_tokens] int64, with -1 in front of shorter texts."""
        ...


class DraftRandom(Protocol):
    """Uniform random numbers for drafting, reproducible per request. The verifier uses another stream."""

    def uniform(self, draft_index: int) -> Tensor:
        """One uniform in (0, 1) per request for the draft token at `draft_index`. Returns [B] float64."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingView:
    """The sampling parameters that a proposer declared. None means that a parameter was not declared."""

    temperature: Tensor | None = None  # [B] float32, 0 means greedy
    top_k: Tensor | None = None  # [B] int64, 0 means off
    top_p: Tensor | None = None  # [B] float32, 1 means off
    min_p: Tensor | None = None  # [B] float32, 0 means off
    all_greedy: bool = False  # known on the host: every temperature is 0, and no distribution will be read


@dataclass(frozen=True, kw_only=True)
class StepView(Generic[R]):
    """What a proposer sees of one step, after its tokens were committed. R is the class's RequestOptions.

    The view is borrowed: it is valid during the call, and nothing in it may be written. It shows every request that
    computed anything in the step and is not known to have ended. Drafts are wanted where `budget` is positive. Of a
    request whose end is not known yet, the budget may be positive too, and its draft is dropped. A request is never
    shown before its `on_start` or after its `on_finish`.
    """

    requests: tuple[RequestView[R], ...]  # [B]
    width: int  # of the draft: K of this step, or its most nodes where drafts are trees
    slots: Tensor  # [B] int64, stable index below max_num_seqs while a request runs
    generation: Tensor  # [B] int64, changes when a slot changes hands or its request is computed again
    phase: Tensor  # [B] int64, Phase
    committed_length: Tensor  # [B] int64, tokens of the whole prompt and the output; the newest has no KV yet
    newest_token: Tensor  # [B] int64; in the middle of a prompt, the next prompt token
    num_drafted: Tensor  # [B] int64, drafts verified in this step
    num_accepted: Tensor  # [B] int64, 0 .. num_drafted
    budget: Tensor  # [B] int64, 0 .. K: the most drafts that the row can use; nodes, where drafts are trees
    kept: KeptTokens
    random: DraftRandom
    sampling: SamplingView | None = None  # None means that none was declared
    history: TokenHistory | None = None  # None means that it was not declared
    rejected: RejectedTokens | None = None  # None means that `TargetTokens.rejected` was not asked for
    accepted_nodes: Tensor | None = None
    """[B, K] int64, the nodes of the verified trees that were accepted, from the root on, padded with -1. A chain's are
    0, 1, 2 and so on. None means that the proposer drafts chains."""
    dummy: bool = False
    """The engine keeps ranks in step, or warms up: return a draft of the right form, and change no state.

    On the host it has no requests. On a device it may have some, which are never started or finished: what a pass
    writes to their draft KV belongs to nobody.
    """

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """[B]"""
        return tuple([each.request_id for each in self.requests])

    @property
    def num_committed(self) -> Tensor:
        """Tokens that the step added to each request's output: [B] int64. 0 in the middle of a prompt."""
        return (self.num_accepted + 1).masked_fill(self.phase == Phase.PREFILL, 0)


@dataclass(frozen=True, kw_only=True)
class DraftDistribution:
    """The distributions that drafted tokens were drawn from. `kind` tags each row, so that one batch can mix forms.

    Only the tensors of the kinds that occur are present. A row tagged ONE_HOT ignores them all. Each drafted token must
    have a probability above 0 or a finite logit, else the engine raises SD-E206. A sparse id that occurs twice has the
    sum of its probabilities.

    Entry j of a row is the distribution that the tokens after place j are drawn from. Place 0 is the newest token and
    place i + 1 is node i. So entry j of a chain belongs to its draft j. Siblings in a tree share one entry.
    """

    kind: Tensor  # [B] uint8, DistributionKind
    probs: Tensor | None = None  # [B, K, Vd]
    logits: Tensor | None = None  # [B, K, Vd], after temperature and filters: the distribution is their softmax
    sparse_ids: Tensor | None = None  # [B, K, M] target ids, padded with -1
    sparse_probs: Tensor | None = None  # [B, K, M]
    replacement: bool = False
    """How siblings in a tree were drawn. False: each from what the earlier ones leave, renormalised (arXiv 2402.12374).
    True: each from the whole distribution, and equal siblings are possible."""


@dataclass(frozen=True)
class Draft:
    """What a proposer offers for one step.

    With a reported distribution, the length of a row may depend on the prefix and on the distribution. It may never
    depend on the drawn token: trimming an unlikely token changes the output distribution. That binds the engine too,
    which cuts by prefix and budget only: a token that a mask forbids stays, and is rejected. One-hot drafts
    (`distribution` is None or the row is tagged ONE_HOT) may be trimmed at will. arXiv 2211.17192 has the rule that
    verification applies.

    With `parents` each row is a tree, and its drafts are nodes in the order in which they were drawn. A node hangs from
    an earlier one. The engine may cut the last nodes of a row. `specdec.sdk.trees` has functions that build trees.
    """

    token_ids: Tensor  # [B, K] int64 target ids, padded with -1
    lengths: Tensor  # [B] int64, 0 .. K
    _: KW_ONLY
    distribution: DraftDistribution | None = None  # None means that every row is one-hot
    parents: Tensor | None = None
    """[B, K] int64: node i hangs from node parents[i] < i, or from the newest token where it is -1, as in padding. None
    means that every row is a chain."""

    @classmethod
    def from_trees(cls, trees: Sequence[Sequence[tuple[int, int]]], width: int) -> Draft:
        """A one-hot draft on the CPU, one tree per request.

        trees: (parent, token id) of each node, in an order in which a parent stands before its children.
        width: `step.width`, the most nodes of a tree.

        Raises as `from_lists` does.
        """
        import torch

        tokens = cls.from_lists([[token for _, token in tree] for tree in trees], width)
        padded = [[*(parent for parent, _ in tree), *[-1] * (width - len(tree))] for tree in trees]
        parents = torch.tensor(padded, dtype=torch.int64).reshape(len(trees), width)
        return cls(tokens.token_ids, tokens.lengths, parents=parents)

    @classmethod
    def from_lists(cls, drafts: Sequence[Sequence[int]], width: int) -> Draft:
        """A one-hot draft on the CPU, one list of token ids per request.

        drafts: integers of Python or NumPy, or tensors of one integer.
        width: `step.width`, the most tokens of a draft.

        Raises ValueError if a list is longer than `width`, and TypeError for a float, a bool or a text among
        the ids.
        """
        import torch

        longest = max(map(len, drafts), default=0)
        if longest > width:
            raise ValueError(f"a draft has {longest} tokens, and this step takes at most {width}")
        padded = [[*map(token_id, ids), *[PADDING_TOKEN_ID] * (width - len(ids))] for ids in drafts]
        lengths = [len(ids) for ids in drafts]
        return cls(
            torch.tensor(padded, dtype=torch.int64).reshape(len(drafts), width),
            torch.tensor(lengths, dtype=torch.int64),
        )
