"""Drafting a whole block in one pass over the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, Services, StepView, TargetInfo
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.kept_entries import kept_entries
from specdec.sdk.model_proposer import (
    DraftVocabulary,
    Drawing,
    ParallelOptions,
    ParallelProposer,
    Weights,
    draft_kv_of,
    per_request,
    width_of,
)

from .checkpoint import DFlashSpec
from .domino import DominoWalk
from .lilicorr import RerankedWalk
from .markov import MarkovWalk
from .network import DFlashNetwork
from .selector import SelectorWalk
from .tensors import mapped_ids, mask_embedding, mask_token_id, open_weights
from .variants import Member
from .walk import Block, Walk
from .xpress import XPressWalk

_WALKS: dict[Member, Callable[[Checkpoint, DFlashSpec], Walk]] = {
    Member.LILICORR: RerankedWalk,
    Member.DFLASH2: SelectorWalk,
    Member.DSPARK: MarkovWalk,
    Member.DOMINO: DominoWalk,
    Member.XPRESS: XPressWalk,
}


class DFlashOptions(ParallelOptions):
    """Options of the DFlash family."""

    sample_from_anchor: bool | None = Field(
        default=None, description="whether the anchor's slot drafts a token. null: what the checkpoint says"
    )


class DFlashProposer(ParallelProposer):
    """DFlash (arXiv 2602.06036): an anchor and K mask tokens are run once, and each slot gives the token at its place.

    Its relatives draw the tokens of a block in other ways (`walk.py`): DSpark gives each slot a bias from the token
    before it.

    The draft KV holds one row for every position that the target has run, made of the target's hidden states there. A
    block's own keys and values lie past them until the next step's rows take their places: no row is made of a token
    that was rejected, or of one that was drafted. The newest token has no hidden states yet; it is the anchor.
    """

    DRAFTS_TREES = True

    Options = DFlashOptions
    options: DFlashOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The hidden states that the checkpoint names, draft KV of its layers and a block past the newest token.

        Raises Refusal if the checkpoint does not fit the target, or is a variant; CheckpointError SD-E170, SD-E171.
        """
        checkpoint = cls.open_checkpoint(config)
        spec = DFlashSpec.read(checkpoint, target, config.options.sample_from_anchor)
        spec.check_fits(target)
        with torch.device("meta"):  # what it refuses, it refuses before weights are loaded
            walk_of(checkpoint, spec)
        kv = draft_kv_of(
            spec.decoder,
            num_layers=len(spec.modes),
            lookahead=spec.num_slots(config.num_draft_tokens),
            dtype=config.network.dtype,
        )
        most, states = spec.max_draft_tokens, spec.boundaries
        needs = cls.shared_needs(config, target, kv, hidden_states=states, max_draft_tokens=most)
        is_dense = "dense" in needs.distributions
        return needs.replace(draft_vocabulary=mapped_ids(checkpoint, spec, target)) if is_dense else needs

    def build(self) -> None:
        """Load the network and tie it to the target. Raises CheckpointError: SD-E172 .. SD-E175; Refusal."""
        checkpoint = self.open_checkpoint(self.config)
        self._spec = spec = DFlashSpec.read(checkpoint, self.target, self.options.sample_from_anchor)
        weights = open_weights(checkpoint, self.services, spec)
        decoder = self.services.build_decoder(spec.decoder, self.settings)
        self._num_slots = spec.num_slots(self.config.num_draft_tokens)
        self.network = DFlashNetwork(spec, decoder, self._num_slots)
        weights.fill(self.network)
        if spec.draft_vocab_size != self.target.vocab_size or "d2t" in weights:
            d2t = weights.take("d2t", spec.draft_vocab_size)
            self.vocabulary = DraftVocabulary.from_offsets(d2t, self.target.vocab_size)
        self._tie(weights, checkpoint)
        weights.finish()
        self.services.finish(self.network, self.settings)

    def _tie(self, weights: Weights, checkpoint: Checkpoint) -> None:
        width = self._spec.width
        embedding = self.load_embedding(weights, width)
        head = self.load_head(weights, width, self._spec.draft_vocab_size, logit_scale=checkpoint.logit_scale)
        with self.services.device:
            walk = walk_of(checkpoint, self._spec)
        weights.fill(walk)
        self.network.attach(embedding, head, self._mask(embedding, width, checkpoint), walk)

    def _mask(self, embedding: torch.nn.Module, width: int, checkpoint: Checkpoint) -> Tensor:
        if self._spec.has_mask_embedding:
            return mask_embedding(checkpoint, self._spec, width).to(self.services.device)
        mask_id = mask_token_id(checkpoint, self._spec, self.services.tokenizer)
        row: Tensor = embedding(torch.tensor([mask_id], device=self.services.device))[0]
        return row * self._spec.embedding_scale

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Bind as `ParallelProposer` does, and load the network."""
        super().bind(target, services)
        self._compiled_entries = services.compile(self._entries)
        self._captured_context = services.capture(self._write_each)

    @torch.inference_mode()
    def observe(self, step: StepView) -> None:
        """Write the context rows of everything that the step committed."""
        if not len(step):
            return
        kept = step.kept
        hidden = kept.hidden_cat()
        width = width_of(step)
        if width is not None:
            self._captured_context(step.slots, kept.num_kept, *per_request(step, width, kept.positions, hidden))
            return
        self._write(*self._compiled_entries(step.slots, kept.token_offsets, kept.num_kept, kept.positions, hidden))

    def _entries(
        self, slots: Tensor, token_offsets: Tensor, num_kept: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """The arguments of `_write` for all entries of a step."""
        index, owner = kept_entries(token_offsets, num_kept, positions.shape[0])
        positions = positions[index]
        return slots[owner], positions, list(self.network.context(hidden[index], positions))

    def _write_each(self, slots: Tensor, num_kept: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """Write the first `num_kept` of each request's entries [b, W]. The others give way to the last of these."""
        width = positions.shape[1]
        entry = torch.arange(width, device=slots.device).minimum(num_kept[:, None] - 1)
        owner = torch.arange(len(slots), device=slots.device)[:, None].expand(-1, width)
        positions = positions[owner, entry].flatten()
        self._write(
            slots[owner].flatten(), positions, self.network.context(hidden[owner, entry].flatten(0, 1), positions)
        )
        return slots

    def _write(self, slots: Tensor, positions: Tensor, context: Iterable[tuple[Tensor, Tensor]]) -> None:
        store = self.services.draft_kv()
        for layer, (keys, values) in enumerate(context):
            store.write(layer, slots, positions, keys, values)

    def block_inputs(self, step: StepView) -> tuple[Tensor, ...]:
        """Where each block goes, its anchor, and what the walk sees of the step."""
        return step.slots, step.kept.next_position, step.newest_token, *self.network.walk.sees(step)

    def draw_block(self, drawing: Drawing, num_tokens: int, *inputs: Tensor) -> None:
        """Run one pass over a block per request. It is always as wide as K asks, because the width
        changes the draft.
        """
        slots, starts, anchors, *seen = inputs
        outputs, logits = self._run_block(slots, starts, anchors)
        block = Block(anchors, outputs, logits, num_tokens, tuple(seen), self.network.embed, self.network.project)
        self.network.walk.draw(drawing, block)

    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """The logits of the block before the walk."""
        return self._run_block(*inputs[:3])[1][:, :num_tokens]

    def _run_block(self, slots: Tensor, starts: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(self._num_slots, device=slots.device)
        cu_queries = torch.arange(len(slots) + 1, device=slots.device) * len(places)
        store = self.services.draft_kv()
        by_mode = {mode: store.attention(slots, starts, cu_queries, mode) for mode in set(self._spec.modes)}
        attention = [by_mode[mode] for mode in self._spec.modes]
        outputs, logits = self.network(anchors, starts[:, None] + places, attention)
        return outputs, logits


def walk_of(checkpoint: Checkpoint, spec: DFlashSpec) -> Walk:
    """Make the walk of a checkpoint, to be filled. Raises CheckpointError: SD-E170, SD-E171."""
    walk = _WALKS.get(spec.member)
    return Walk() if walk is None else walk(checkpoint, spec)
