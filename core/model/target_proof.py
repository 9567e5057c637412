"""Shows at load that a target, as it is served, computes what transformers computes with its own eager attention.

One ragged pass of two requests over a paged cache is compared with passes of one request each. Every attention module
of the served pass is given what eager attention was given, so that a difference is seen where it arises and rounding
does not add up. How far rounding may reach is measured: a second eager pass reads inputs that are disturbed by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.errors import UnsupportedModelError

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..cache.transfer import upload
from ..request.request import Request, Scheduled
from .attention import attending_by
from .loading import loading
from .target import ForwardInput, TargetModel

MOST_PARAMETERS = 2 * 10**9
"""Of a model that is always proved."""

_SHORT, _LONG, _LONGEST = 5, 12, 64  # tokens of the two requests; of a text that is longer than a window
_BEYOND_WINDOW = 4
_SLACK = 4  # times what rounding did to the disturbed pass
_ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # share of a row that is always allowed
_QUANTISED = 5e-2


Parts = defaultdict[int, list[Tensor]]


@dataclass(frozen=True)
class _Seen:
    """What passes over N tokens computed, in parts one behind the other; layers by number."""

    inputs: Parts = field(default_factory=lambda: defaultdict(list))  # [N, H] that its attention would have been given
    outputs: Parts = field(default_factory=lambda: defaultdict(list))  # [N, H] of its attention
    logits: list[Tensor] = field(default_factory=list)  # [N, V]

    def by_place(self) -> Iterator[tuple[str, bool, Tensor]]:
        """Places in the order of the model, whether the same was given to what computed it, and what it computed."""
        for layer in sorted(self.outputs):
            yield f"before the attention of layer {layer}", False, torch.cat(self.inputs[layer])
            yield f"the attention of layer {layer}", True, torch.cat(self.outputs[layer])
        yield "the logits", False, torch.cat(self.logits)


class TargetProof:
    """What eager attention computed, to compare with what is served."""

    num_requests = 2

    def __init__(self, target: TargetModel, longest: int | None, *, quantised: bool = False) -> None:
        """Raises ConfigError SD-E192 if the model does not run with eager attention."""
        self._target = target
        self._texts = _texts(target, longest)
        self._quantised = quantised
        summary = "this model does not run with eager attention, so that it cannot be proved"
        with loading("SD-E192", summary, _FIX), attending_by("eager", target.model), torch.inference_mode():
            self._expected = self._eager_pass({})
            self._given = {layer: torch.cat(parts) for layer, parts in self._expected.inputs.items()}
            self._disturbed = self._eager_pass(self._rounded())

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request."""
        return max(map(len, self._texts))

    def check(self, cache: KVCache, addressing: Addressing) -> None:
        """Run the served pass over a cache with room for `num_requests` texts of `num_tokens`.

        Raises UnsupportedModelError SD-E189 at the first place that differs.
        """
        served = self._served_pass(cache, addressing)
        measured = zip(served.by_place(), self._expected.by_place(), self._disturbed.by_place(), strict=True)
        for (place, forced, ours), (_, _, expected), (_, _, disturbed) in measured:
            wrong = self._wrong_rows(ours, expected, disturbed)
            if wrong > self._most_wrong(len(ours), forced):
                facts = {"model_type": self._target.config.model_type, "first difference": place}
                facts |= {"tokens": f"{wrong} of {len(ours)}", "fix": _FIX[""]}
                raise UnsupportedModelError(
                    "SD-E189", "this model is served otherwise than transformers' eager attention computes it", facts
                )

    def _wrong_rows(self, ours: Tensor, expected: Tensor, disturbed: Tensor) -> int:
        """Rows that differ by more than rounding; those that eager attention makes infinite tell nothing."""
        ours, expected, disturbed = ours.float(), expected.float(), disturbed.float()
        share = _QUANTISED if self._quantised else _ROUNDING[self._target.dtype]
        allowed = _SLACK * (disturbed - expected).norm(dim=-1) + share * expected.norm(dim=-1)
        wrong = ~((ours - expected).norm(dim=-1) <= allowed) & allowed.isfinite()
        return int(wrong.sum())

    def _most_wrong(self, num_rows: int, forced: bool) -> int:
        """A difference in one row proves no fault. Without forced tokens, rounding alone may choose other experts."""
        exact = self._target.dtype == torch.float32 and not self._quantised
        return 1 if forced or exact else num_rows // 4

    def _rounded(self) -> dict[int, Tensor]:
        """What attention was given, with every number off by the dtype's precision, up or down."""
        step = _QUANTISED / 8 if self._quantised else torch.finfo(self._target.dtype).eps
        generator = torch.Generator().manual_seed(1)
        rounded = {}
        for layer, given in self._given.items():
            signs = torch.randint(2, given.shape, generator=generator).to(given.device) * 2 - 1
            rounded[layer] = given * (1 + step * signs).to(given.dtype)
        return rounded

    def _eager_pass(self, given: Mapping[int, Tensor]) -> _Seen:
        seen, start = _Seen(), 0
        for text in self._texts:
            share = {layer: hidden[start : start + len(text)] for layer, hidden in given.items()}
            with _watched(self._target.attention_modules, share, seen):
                positions = torch.arange(len(text), device=text.device)[None]  # as `generate` counts them
                output = self._target.model(input_ids=text[None], position_ids=positions, use_cache=False)
            seen.logits.append(output.logits[0])
            start += len(text)
        return seen

    def _served_pass(self, cache: KVCache, addressing: Addressing) -> _Seen:
        device = self._target.device
        tokens = torch.cat(self._texts)[None]
        positions = torch.cat([torch.arange(len(text), device=device) for text in self._texts])[None]
        shares = _shares([len(text) for text in self._texts], addressing.block_size)
        context = addressing.of_batch(cache, shares, upload(addressing.columns(shares), device))
        rows = torch.arange(tokens.shape[1], device=device)
        passed = cache.states.plan(shares) if cache.states else None
        inputs = ForwardInput(tokens[0], positions[0], rows, context, passed)
        seen = _Seen()
        with _watched(self._target.attention_modules, self._given, seen):
            seen.logits.append(self._target.forward(inputs).logits)
        return seen


_FIX = {"": "prove_target=False serves it as it is; its text may not be the model's"}


def is_wanted(target: TargetModel, asked: bool | None) -> bool:
    """Whether to prove the target. asked: None means to prove models whose pass costs little."""
    if asked is not None:
        return asked
    num_parameters: int = sum(parameter.numel() for parameter in target.model.parameters())
    return num_parameters <= MOST_PARAMETERS


def _texts(target: TargetModel, longest: int | None) -> list[Tensor]:
    """Two requests of different lengths, one longer than the windows where that is short."""
    windows = [window + _BEYOND_WINDOW for window in target.windows if window is not None]
    length = max([_LONG, *(window for window in windows if window <= _LONGEST)])
    generator = torch.Generator().manual_seed(0)
    most = longest or length
    lengths = min(_SHORT, most), min(length, most)
    vocab_size = target.config.vocab_size
    return [torch.randint(vocab_size, (each,), generator=generator).to(target.device) for each in lengths]


def _shares(lengths: Sequence[int], block_size: int) -> list[Scheduled]:
    """Give each request a row of its own, with blocks in descending order: nothing lies right by accident."""
    shares, first_token, first_block = [], 0, 0
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        blocks = list(range(first_block + count - 1, first_block - 1, -1))
        request = Request.stand_in(length, row, row + 1, blocks)
        shares.append(Scheduled(request, 0, length, 0, samples=True, first_token=first_token))
        first_token, first_block = first_token + length, first_block + count
    return shares


@contextmanager
def _watched(modules: Mapping[int, nn.Module], given: Mapping[int, Tensor], seen: _Seen) -> Iterator[None]:
    """Keep what the modules read and return; they are given the hidden states of their layer in `given` instead."""
    with ExitStack() as hooks:
        for layer, module in modules.items():
            give, keep = partial(_give, seen, layer, given.get(layer)), partial(_keep, seen, layer)
            hooks.enter_context(module.register_forward_pre_hook(give, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(keep))
        yield


def _give(
    seen: _Seen, layer: int, given: Tensor | None, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = args[0] if args else named["hidden_states"]
    seen.inputs[layer].append(hidden.flatten(0, -2))
    if given is None:
        return args, named
    replaced = given.view_as(hidden)
    return ((replaced, *args[1:]), named) if args else (args, named | {"hidden_states": replaced})


def _keep(seen: _Seen, layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    seen.outputs[layer].append((output if isinstance(output, Tensor) else output[0]).flatten(0, -2))
