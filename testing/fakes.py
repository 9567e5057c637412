"""Stand-ins for the engine: a target's facts, its services, and step views made from plain token lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.checkpoint import load_tensors
from specdec.sdk.config import NetworkSettings
from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import KNOWN, Ahead, AttentionMode, DraftKV, LayerRunner, TargetKVReader
from specdec.sdk.types import KeptTokens, Phase, RequestView, SamplingView, StepView, TargetInfo


def fake_target_info(**changes: Any) -> TargetInfo:
    """A small target's facts: vocabulary 64, hidden size 16, 4 layers, 8 rows of 256 tokens."""
    facts: dict[str, Any] = {
        "model": "fake",
        "checkpoint_dir": None,
        "config": {},
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 16,
        "extensions": frozenset(KNOWN) - {Ahead.id},
        "max_nodes": 64,
    }
    return TargetInfo(**(facts | changes))


@dataclass(frozen=True)
class FakeRandom:
    """Uniform numbers fixed by (seed, request, committed length, draft index), like the engine's draft stream."""

    seed: int
    request_ids: Sequence[str]
    lengths: Sequence[int]

    def uniform(self, draft_index: int) -> Tensor:
        """[B] float64 in (0, 1)."""
        return torch.tensor(
            [
                torch.rand(
                    (), dtype=torch.float64, generator=_generator(f"{self.seed}:{name}:{length}:{draft_index}")
                ).clamp_min(2**-53)
                for name, length in zip(self.request_ids, self.lengths, strict=True)
            ]
        )


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "big"))


class FakeDraftKV:
    """Draft KV as one dense tensor [slots, positions, heads, head_dim] per layer, NaN until written."""

    def __init__(self, spec: DraftKV, info: TargetInfo) -> None:
        shape = (info.max_num_seqs, info.max_model_len + spec.lookahead, spec.num_heads)
        value_dim = spec.value_head_dim or spec.head_dim
        self._keys = [torch.full((*shape, spec.head_dim), torch.nan) for _ in range(spec.num_layers)]
        self._values = [torch.full((*shape, value_dim), torch.nan) for _ in range(spec.num_layers)]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, heads, head_dim] at (slots [N], positions [N])."""
        self._keys[layer][slots, positions] = keys
        self._values[layer][slots, positions] = values

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, heads, head_dim] of one slot; NaN where nothing was written."""
        return self._keys[layer][slot, :length], self._values[layer][slot, :length]

    def attention(
        self,
        slots: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        mode: AttentionMode = "causal",
        parents: Tensor | None = None,
    ) -> Mapping[str, Any]:
        """What the attention of a network built by FakeServices takes. Raises Refusal for trees."""
        if parents is not None:
            raise Refusal("the fake draft KV serves chains alone", "an engine")
        return {"fake_pass": FakePass(self, slots.tolist(), starts.tolist(), cu_queries.tolist(), mode)}


@dataclass(frozen=True)
class FakePass:
    """Attention of one pass over a FakeDraftKV, query by query, straight from the definition."""

    store: FakeDraftKV
    rows: list[int]
    starts: list[int]
    bounds: list[int]
    mode: AttentionMode

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """[N, Hq, D], [N, Hkv, D], [N, Hkv, Dv] -> [N, Hq, Dv]."""
        groups = query.shape[1] // keys.shape[1]
        outputs = []
        for row, start, first, stop in zip(self.rows, self.starts, self.bounds, self.bounds[1:], strict=False):
            positions = torch.arange(start, start + stop - first)
            self.store.write(layer, torch.full_like(positions, row), positions, keys[first:stop], values[first:stop])
            all_keys, all_values = self.store.read(layer, row, start + stop - first)
            for offset in range(stop - first):
                seen = self._seen(start, offset, stop - first, window)
                scores = torch.einsum(
                    "hd,khd->hk", query[first + offset], all_keys[seen].repeat_interleave(groups, dim=1)
                )
                weights = (scores * scale).softmax(dim=-1)
                outputs.append(torch.einsum("hk,khd->hd", weights, all_values[seen].repeat_interleave(groups, dim=1)))
        return torch.stack(outputs)

    def _seen(self, start: int, offset: int, count: int, window: int | None) -> slice:
        last = start + (count if self.mode == "full_block" else offset + 1)
        if window is None:
            return slice(0, last)
        from_ = start - window if self.mode != "causal" else start + offset + 1 - window
        return slice(max(0, from_), last)


def _fake_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    fake_pass: FakePass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return fake_pass.attend(module.layer_idx, query, key, value, scale, sliding_window)[None], None


class FakeServices:
    """`specdec.sdk.Services` over a random embedding that is also the head. No target runs; everything is float32."""

    def __init__(
        self, target: TargetInfo | None = None, draft_kv: DraftKV | None = None, tokenizer: Any = None
    ) -> None:
        self.target = target or fake_target_info()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.tokenizer = tokenizer
        self.logit_scale = 1.0
        shape = (self.target.vocab_size, self.target.hidden_size)
        self.embedding = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self._draft_kv = FakeDraftKV(draft_kv, self.target) if draft_kv else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., H] for [...] int64."""
        return self.embedding[token_ids]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """[..., V] for [..., H]."""
        return hidden @ self.embedding.T

    def load_causal_lm(
        self, checkpoint: str | Path, settings: NetworkSettings, tensors: Mapping[str, Tensor] | None = None
    ) -> Any:
        """A transformers causal LM from a directory."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="float32", attn_implementation=_fake_attention_name(), **_experts(settings)
        ).eval()
        model.load_state_dict(tensors or {}, strict=False)
        return model

    def build_decoder(self, config: Mapping[str, Any], settings: NetworkSettings) -> Any:
        """A transformers decoder with random weights."""
        from transformers import AutoConfig, AutoModel

        values = dict(config)
        hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
        hf_config.vocab_size, hf_config.pad_token_id = 1, None
        return AutoModel.from_config(
            hf_config, dtype=torch.float32, attn_implementation=_fake_attention_name(), **_experts(settings)
        ).eval()

    def finish(self, network: torch.nn.Module, settings: NetworkSettings) -> None:
        """float32, no gradients."""
        network.to(torch.float32).eval().requires_grad_(False)

    def allowed(self, request_id: str, suffix: Sequence[int] = ()) -> Tensor | None:
        """No request has a grammar."""
        return None

    def forced(self, request_id: str) -> str:
        """No request has a grammar."""
        return ""

    def load_tensors(self, checkpoint: str | Path, prefixes: Sequence[str] = ("",)) -> dict[str, Tensor]:
        """The tensors in a checkpoint directory whose names start with one of `prefixes`."""
        return load_tensors(Path(checkpoint), tuple(prefixes))

    def draft_kv(self) -> FakeDraftKV:
        """The store, if `draft_kv` was given."""
        if self._draft_kv is None:
            raise Refusal("Services.draft_kv belongs to draft_kv@1", "FakeServices(draft_kv=DraftKV(...))")
        return self._draft_kv

    def target_kv(self) -> TargetKVReader:
        """Raise Refusal: the fakes run no target."""
        raise Refusal("these fakes run no target, and so have no keys of it", "specdec.LLM, or check_proposer")

    def target_layers(self, layers: Sequence[int], adapter: Mapping[str, torch.nn.Module] | None = None) -> LayerRunner:
        """Raise Refusal: the fakes run no target."""
        raise Refusal("these fakes run no target, and so have no layers of it", "specdec.LLM, or check_proposer")

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself."""
        return function

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself."""
        return function


def _fake_attention_name() -> str:
    from transformers import AttentionInterface

    AttentionInterface.register("specdec_fake", _fake_attention)
    return "specdec_fake"


def _experts(settings: NetworkSettings) -> dict[str, str]:
    return {} if settings.moe_backend in (None, "auto") else {"experts_implementation": str(settings.moe_backend)}


@dataclass(frozen=True)
class FakeHistory:
    """The tokens of requests, as `TokenHistory` shows them on the host."""

    tokens: Sequence[Sequence[int]]

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        return list(self.tokens[request][start:])

    def of(self, request: int, start: int = 0) -> Tensor:
        return _ints(self.token_ids(request, start))

    def tail(self, num_tokens: int) -> Tensor:
        ends = [list(each[max(len(each) - num_tokens, 0) :]) for each in self.tokens]
        padded = [[-1] * (num_tokens - len(each)) + each for each in ends]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(ends), num_tokens)


def step_view(
    tokens: Sequence[Sequence[int]],
    num_draft_tokens: int,
    *,
    shown_from: Sequence[int] | None = None,
    budget: Sequence[int] | None = None,
    request_ids: Sequence[str] | None = None,
    slots: Sequence[int] | None = None,
    generation: Sequence[int] | None = None,
    num_drafted: Sequence[int] | None = None,
    num_accepted: Sequence[int] | None = None,
    temperature: Sequence[float] | None = None,
    hidden: Sequence[Tensor] = (),
    seed: int = 0,
) -> StepView:
    """The host view of requests with these committed tokens, in a step that computed positions from `shown_from`.

    tokens: per request, prompt and output so far; every one but the newest has KV. `shown_from` defaults to 0 (the
    whole request is new). `hidden`, L of [N, H], is for the kept tokens in order. History is always given.
    """
    count = len(tokens)
    starts = list(shown_from or [0] * count)
    names = tuple(request_ids or (f"request-{b}" for b in range(count)))
    lengths = [len(ids) for ids in tokens]
    slot_ids = list(slots if slots is not None else range(count))
    generations = list(generation or [1] * count)
    facts = zip(names, slot_ids, generations, tokens, strict=True)
    requests = [
        RequestView(request_id=name, slot=slot, generation=number, prompt_token_ids=tuple(ids[:1]))
        for name, slot, number, ids in facts
    ]
    kept = [range(start, length - 1) for start, length in zip(starts, lengths, strict=True)]
    return StepView(
        requests=tuple(requests),
        width=num_draft_tokens,
        slots=_ints(slot_ids),
        generation=_ints(generations),
        phase=_ints([Phase.DECODE if start else Phase.PREFILL_DONE for start in starts]),
        committed_length=_ints(lengths),
        newest_token=_ints([ids[-1] for ids in tokens]),
        num_drafted=_ints(num_drafted or [0] * count),
        num_accepted=_ints(num_accepted or [0] * count),
        budget=_ints(budget if budget is not None else [num_draft_tokens] * count),
        kept=KeptTokens(
            token_offsets=_ints([0, *(len(each) for each in kept)]).cumsum(0),
            num_kept=_ints([len(each) for each in kept]),
            kept_start=_ints(starts),
            positions=_ints([position for each in kept for position in each]),
            token_ids=_ints([ids[i] for ids, each in zip(tokens, kept, strict=True) for i in each]),
            next_token_ids=_ints([ids[i + 1] for ids, each in zip(tokens, kept, strict=True) for i in each]),
            hidden=tuple(hidden),
        ),
        random=FakeRandom(seed, names, lengths),
        sampling=None if temperature is None else SamplingView(temperature=torch.tensor(list(temperature))),
        history=FakeHistory(tokens),
    )


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
