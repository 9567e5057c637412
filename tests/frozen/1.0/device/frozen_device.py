"""What followed the newest token before, in a table of the texts; else what the target's head says again."""

from __future__ import annotations

import torch

from specdec.sdk import Draft, Needs, ProposerBase, Services, StepView, TargetInfo


class Device(ProposerBase):
    api_version = "1.0"
    needs = Needs(placement="device", hidden_states=("final",), whole_prompt=True)

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.services, self.length = services, target.max_model_len
        shape = target.max_num_seqs, target.max_model_len + 1  # rejected tokens go into the last column
        self.texts = torch.full(shape, -1, device=services.device)
        self.generations = self.texts.new_full((target.max_num_seqs,), -1)

    def observe(self, step: StepView) -> None:
        if step.dummy or len(step) == 0:
            return
        kept, begins = step.kept, self.generations[step.slots] != step.generation
        self.generations[step.slots] = step.generation
        self.texts[step.slots] = self.texts[step.slots].masked_fill(begins[:, None], -1)
        counts = kept.token_offsets[1:] - kept.token_offsets[:-1]
        owners = torch.repeat_interleave(counts, output_size=len(kept.token_ids))
        places = torch.arange(len(owners), device=owners.device) - kept.token_offsets[owners]
        columns = kept.positions.where(places < kept.num_kept[owners], self.length)
        self.texts[step.slots[owners], columns] = kept.token_ids
        self.texts[step.slots, kept.next_position] = step.newest_token

    def propose(self, step: StepView) -> Draft:
        end, columns = step.kept.next_position[:, None], torch.arange(self.length, device=step.slots.device)
        texts = self.texts[step.slots]
        seen = (texts[:, :-1] == step.newest_token[:, None]) & (columns < end)
        last = columns.where(seen, -1).amax(dim=1, keepdim=True)
        sources = (last + 1 + columns[: step.width]).minimum(end)
        guess = self.services.lm_head(step.kept.hidden[0][step.kept.last]).argmax(-1)
        tokens = texts.gather(1, sources).where(last >= 0, guess[:, None])
        lengths = (end - last).where(last >= 0, 1)[:, 0].minimum(step.budget)
        drafted = columns[: step.width] < lengths[:, None]
        return Draft(tokens.where(drafted, -1), lengths)
