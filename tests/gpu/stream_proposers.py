"""Proposers that use streams of a device rightly and wrongly. Each drafts a function of the newest tokens."""

from __future__ import annotations

import torch

from specdec.sdk import Draft, Needs

CYCLES = 2_000_000


class OnTheCurrent:
    needs = Needs(placement="device")

    def __init__(self, config):
        self.stream = torch.cuda.Stream()

    def propose(self, step):
        return self.draft(step)

    def draft(self, step):
        newest = step.newest_token
        ids = (newest[:, None] * 7 + torch.arange(step.width, device=newest.device)) % 100
        return Draft(ids, torch.full_like(newest, step.width).minimum(step.budget))


class BothWait(OnTheCurrent):
    def propose(self, step):
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(CYCLES)
            draft = self.draft(step)
        current.wait_stream(self.stream)
        return draft


class ReadsEarly(OnTheCurrent):
    def propose(self, step):
        with torch.cuda.stream(self.stream):
            draft = self.draft(step)
        torch.cuda.current_stream().wait_stream(self.stream)
        return draft


class ReturnsEarly(OnTheCurrent):
    def propose(self, step):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(CYCLES)
            return self.draft(step)
