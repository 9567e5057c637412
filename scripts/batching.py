"""Token streams and the batches drawn from them, for the target and everything trained on top of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .corpus import Document


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # [B, T] int64
    next_ids: Tensor  # [B, T] int64, the token after each input token


@dataclass(frozen=True)
class TokenStream:
    """Documents one after the other, each ended by the end-of-sequence token."""

    ids: Tensor  # [N] int32
    num_chars: int

    @property
    def chars_per_token(self) -> float:
        return self.num_chars / self.ids.numel()

    def windows(self, length: int) -> Tensor:
        """All disjoint windows with the token after each, [N // length, length + 1]."""
        return self.ids.unfold(0, length + 1, length)

    def batches(self, *, length: int, num_tokens: int, seed: int) -> Iterator[Batch]:
        """Endless batches of `num_tokens` tokens in windows of `length`, each window once per epoch."""
        windows = self.windows(length)
        size = num_tokens // length
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(windows), generator=generator)
            for rows in order[: len(order) // size * size].view(-1, size):
                yield _batch(windows[rows])

    def in_order(self, *, length: int, num_tokens: int) -> Iterator[Batch]:
        """Each window once, in the stream's order: for validation."""
        for windows in torch.split(self.windows(length), num_tokens // length):
            yield _batch(windows)


def encode_documents(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    max_tokens_per_document: int | None = None,
) -> TokenStream:
    """The stream of `documents`, each cut to `max_tokens_per_document` tokens, its end token included."""
    parts: list[Tensor] = []
    num_chars = 0
    for document in documents:
        encoding = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = [*encoding["input_ids"], tokenizer.eos_token_id][:max_tokens_per_document]
        offsets = encoding["offset_mapping"][: len(ids)]
        num_chars += offsets[-1][1]
        parts.append(torch.tensor(ids, dtype=torch.int32))
    return TokenStream(torch.cat(parts), num_chars)


def _batch(windows: Tensor) -> Batch:
    ids = windows.long()
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
