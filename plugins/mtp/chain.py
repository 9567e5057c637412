"""Several modules in a row, each of which drafts the token at its own depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sdk import Draft, StepView
from specdec.sdk.model_proposer import DraftChain, DrawRule, ModelProposer, per_request, width_of

from .network import MtpModule


class ModuleChain:
    """Module k drafts the (k + 1)-th token (arXiv 2412.19437). Letters: B, b requests, M rows of all, K modules.

    Row i of module k reads the token at i + 1 + k and what module k - 1 made of row i; module 0 reads the target's
    hidden states. So the last k rows of module k have to wait for tokens behind the newest. `observe` runs the rows
    that waited for what the step decided, and keeps the last output of each module. `propose` runs the k rows that
    wait on the drafts instead, and the next `observe` runs them again. So every row that is read is one that a fresh
    pass over the committed tokens would write.
    """

    def __init__(self, modules: Sequence[MtpModule], proposer: ModelProposer) -> None:
        services = proposer.services
        self._modules, self._services = modules, services
        target, dtype = services.target, modules[0].embedding_norm.weight.dtype
        shape = target.max_num_seqs, len(modules), target.hidden_size
        self._decided = torch.zeros(shape, dtype=dtype, device=services.device)
        """Of the request in each row the last output of each module whose tokens are decided."""
        self._generation = torch.full(shape[:1], -1, device=services.device)
        self._captured_observe = services.capture(self._observe_each)
        self._chain = DraftChain(proposer, self._inputs, self._drawn)

    def observe(self, step: StepView) -> None:
        """Run the rows whose tokens the step decided."""
        if not len(step):
            return
        kept, width = step.kept, width_of(step)
        places, is_new = (step.slots, kept.kept_start, kept.num_kept), self._generation[step.slots] != step.generation
        before = self._decided[step.slots].masked_fill(is_new[:, None, None], 0)  # perhaps behind a cached prefix
        columns = kept.next_token_ids, kept.hidden_cat()
        if width is None:
            decided = self._observe(*places, before, kept.token_offsets, *columns)
        else:
            decided = self._captured_observe(*places, before, *per_request(step, width, *columns))
        self._decided[step.slots], self._generation[step.slots] = decided, step.generation

    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        return self._chain.draft(step)

    def _inputs(self, step: StepView, chosen: Tensor | None) -> tuple[Tensor, ...]:
        slots, starts = step.slots, step.kept.next_position
        if chosen is not None:
            slots, starts = slots[chosen], starts[chosen]
        return slots, starts, self._decided[slots]

    def _observe_each(
        self, slots: Tensor, starts: Tensor, num_kept: Tensor, before: Tensor, token_ids: Tensor, hidden: Tensor
    ) -> Tensor:
        """Observe token_ids [b, W] and hidden [b, W, H], which have as many entries for every request."""
        token_offsets = torch.arange(len(slots) + 1, device=slots.device) * token_ids.shape[1]
        return self._observe(slots, starts, num_kept, before, token_offsets, token_ids.flatten(), hidden.flatten(0, 1))

    def _observe(
        self,
        slots: Tensor,  # [B]
        starts: Tensor,  # [B], of the kept tokens
        num_kept: Tensor,  # [B]
        before: Tensor,  # [B, K, H], what the step before gave
        token_offsets: Tensor,  # [B+1]
        token_ids: Tensor,  # [M], after each kept token
        hidden: Tensor,  # [M, H]
    ) -> Tensor:
        """The last decided output of each module: [B, K, H]. Of a module that has none yet, anything."""
        decided: list[Tensor] = []
        for depth in range(len(self._modules)):
            edge = before[:, depth - 1]
            hidden = self._run(depth, slots, starts, token_offsets, token_ids, edge, hidden)
            last = num_kept - 1 - (depth - starts).clamp(min=0)
            decided.append(hidden[token_offsets[:-1] + last.clamp(min=0)])
        return torch.stack(decided, dim=1)

    def _drawn(
        self, rule: DrawRule, num_tokens: int, slots: Tensor, starts: Tensor, decided: Tensor, *numbers: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens behind `starts` [b], the newest positions, of what is decided there [b, K, H]. See `DraftChain`."""
        drawing = rule.drawing(numbers, num_tokens)
        tokens = drawing.draw(self._modules[0].logits(decided[:, 0]))[:, None]
        outputs = decided[:, :0]
        for depth in range(1, num_tokens):
            edge, each = decided[:, depth - 1], torch.arange(len(slots), device=slots.device)
            previous = torch.cat([outputs, edge[:, None]], dim=1)  # one for each row here; the last is not read
            token_offsets = torch.arange(len(slots) + 1, device=slots.device) * depth
            flat = self._run(depth, slots, starts, token_offsets, tokens.flatten(), edge, previous.flatten(0, 1))
            outputs = flat.view(len(slots), depth, -1)
            last = outputs[each, starts.clamp(max=depth) - 1]
            tokens = torch.cat([tokens, drawing.draw(self._modules[depth].logits(last))[:, None]], dim=1)
        return drawing.result()

    def _run(
        self,
        depth: int,
        slots: Tensor,  # [B]
        starts: Tensor,  # [B], the position before the first token
        token_offsets: Tensor,  # [B+1]
        token_ids: Tensor,  # [M]
        edge: Tensor,  # [B, H], what the module before gave in front of its outputs here
        previous: Tensor,  # [M, H], its outputs
    ) -> Tensor:
        """The outputs [M, H] of a module whose rows wait for these tokens: from `starts - depth` on, or from 0.

        A text shorter than that has no such rows in front. Then the last ones get any content, and are overwritten.
        """
        index = torch.arange(len(token_ids), device=slots.device)
        owner = torch.searchsorted(token_offsets[1:], index, right=True)
        offset, missing = index - token_offsets[owner], (depth - starts).clamp(min=0)[owner]
        token_ids = token_ids[(index + missing).clamp(max=len(token_ids) - 1)].clamp(min=0)
        first = (starts - depth).clamp(min=0)
        if depth:
            shifted = torch.where((offset == 0)[:, None], edge[owner], previous[(index - 1).clamp(min=0)])
            previous = torch.where((missing > 0)[:, None], previous, shifted)
        attention = self._services.draft_kv().attention(slots, first, token_offsets)
        module = self._modules[depth]
        return module.recycled(module(token_ids, first[owner] + offset, previous, attention))
