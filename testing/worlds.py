"""What a proposer gets while it is checked: a real target's embedding, head and KV blocks, or a few tokens only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.core.host import (
    Addressing,
    EngineServices,
    KVCache,
    LayerShape,
    PartialTarget,
    Provided,
    RowTable,
    parts_of,
    with_verifier,
)
from specdec.sdk.extensions import DraftKV, DraftKVStore, LayerRunner, TargetKVReader
from specdec.sdk.needs import Needs
from specdec.sdk.services import Services
from specdec.sdk.types import TargetInfo

from .fakes import FakeDraftKV, FakeServices, fake_target_info
from .text import Script
from .watch import Uses

NUM_PROMPTS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class _WatchedServices(EngineServices):
    """The engine's own services, which remember what was asked for."""

    def __init__(self, info: TargetInfo, llm: LLM, needs: Needs, uses: Uses) -> None:
        model, backend = parts_of(llm.engine).model, parts_of(llm.engine).plan.profile.backend
        provided = Provided(own_layers=partial(PartialTarget, model.target))
        super().__init__(info, needs, model.target, model.tokenizer, backend, provided=provided)
        self._uses = uses

    def embed(self, token_ids: Tensor) -> Tensor:
        self._uses.service("embed", *token_ids.shape)
        return super().embed(token_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        self._uses.service("lm_head", *hidden.shape)
        return super().lm_head(hidden)

    def draft_kv(self) -> DraftKVStore:
        self._uses.reads.add("draft_kv")
        self._uses.service("draft_kv")
        return super().draft_kv()

    def target_kv(self) -> TargetKVReader:
        self._uses.reads.add("target_kv")
        return super().target_kv()

    def target_layers(self, layers: Sequence[int], adapter: Mapping[str, torch.nn.Module] | None = None) -> LayerRunner:
        self._uses.reads.add("target_layers")
        return super().target_layers(layers, adapter)


class _FakeServices(FakeServices):
    def __init__(self, info: TargetInfo, spec: DraftKV | None, uses: Uses) -> None:
        super().__init__(info, spec)
        self._uses = uses

    def draft_kv(self) -> FakeDraftKV:
        self._uses.reads.add("draft_kv")
        self._uses.service("draft_kv")
        return super().draft_kv()


@dataclass(frozen=True)
class RealTarget:
    """A target with weights, and what it generates without speculation."""

    model: str
    llm: LLM
    weights: dict[str, Tensor]  # copies
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def info(self) -> TargetInfo:
        return parts_of(self.llm.engine).plan.info

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        """What the target caches in each layer."""
        return parts_of(self.llm.engine).model.target.layer_shapes

    def services(self, info: TargetInfo, needs: Needs, rows: RowTable, cache: KVCache, uses: Uses) -> Services:
        """The engine's services for one proposer, with draft KV on the rows' blocks. What it takes enters `uses`.

        cache: what stands in for the target's.
        """
        addressing = Addressing(rows, parts_of(self.llm.engine).plan.profile.backend)
        services = _WatchedServices(info, self.llm, needs, uses)
        services.lay_out_draft_kv(rows.pool.num_blocks, addressing)
        services.use_cache(cache, addressing)
        return services

    def restore_weights(self) -> list[str]:
        """Put every weight back that was written to. Returns their names."""
        written = []
        with torch.no_grad():
            for name, parameter in parts_of(self.llm.engine).model.target.model.named_parameters():
                if not torch.equal(parameter, self.weights[name]):
                    parameter.copy_(self.weights[name])
                    written.append(name)
        return written


@cache
def load_target(model: str) -> RealTarget:
    """The target on the CPU in float32, loaded once per process, and its greedy outputs without drafts."""
    model = str(with_verifier(model, None)[0])  # of a drafter's checkpoint, its target
    llm = LLM(model, device="cpu", max_num_seqs=NUM_PROMPTS)
    script = Script(seed=0, vocab_size=parts_of(llm.engine).plan.info.vocab_size)
    prompts = [script.prompt(f"prompt-{number}", 3 + 9 * number) for number in range(NUM_PROMPTS)]
    weights = {name: each.detach().clone() for name, each in parts_of(llm.engine).model.target.model.named_parameters()}
    return RealTarget(model, llm, weights, tuple(map(tuple, prompts)), generate(llm, prompts))


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> tuple[tuple[int, ...], ...]:
    """The output tokens of each prompt."""
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    return tuple(tuple(output.outputs[0].token_ids) for output in outputs)


@dataclass(frozen=True)
class FewTokens:
    """A vocabulary so small that every draft can be enumerated. For proposers without a checkpoint."""

    vocab_size: int = 4

    @property
    def info(self) -> TargetInfo:
        return replace(fake_target_info(), vocab_size=self.vocab_size)

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        return ()

    def services(self, info: TargetInfo, needs: Needs, rows: RowTable, cache: KVCache, uses: Uses) -> Services:
        """The fakes of this package."""
        return _FakeServices(info, needs.extension(DraftKV), uses)


World = RealTarget | FewTokens
"""Where a proposer is tried."""
