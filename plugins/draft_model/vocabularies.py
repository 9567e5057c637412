"""Two tokenizers: whether they are one, which tokens stand for the same bytes, and how a draft crosses over.

Lossless speculative decoding with heterogeneous vocabularies is due to arXiv 2502.05202: by tokens that both have
(there "token-level intersection"), or by the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint

Way = Literal["same", "intersection", "reencode"]
Asked = Literal["auto", "same", "intersection", "reencode"]

FEWEST_SHARED = 0.5
"""The part of the target's tokens that the draft model has to have for the way by tokens: fewer tell it too little."""

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_SIGN = "\u2581"

Meaning = tuple[bool, bytes]
"""Whether a token is special, and the bytes that it stands for."""


@dataclass(frozen=True)
class Vocabularies:
    """A draft model's tokenizer beside the target's, and the way from one to the other."""

    way: Way
    own: Any  # transformers tokenizers; None with "same", which needs neither
    target: Any
    shared: tuple[tuple[int, int], ...] = ()  # draft id and target id of each token that both have

    @classmethod
    def choose(
        cls, checkpoint: Checkpoint, size: int, target: TargetInfo, asked: Asked, *, trust_remote_code: bool = False
    ) -> Vocabularies:
        """size: of the draft model's table. "auto": the first way that can be gone, in the order of `Way`.

        trust_remote_code: whether code that the draft model's checkpoint brings along may run.

        Without a tokenizer on both sides they count as the same; their sizes are compared elsewhere. Raises Refusal
        for a way that cannot be gone.
        """
        if asked in ("auto", "same") and _have_same_files(checkpoint.directory, target.checkpoint_dir):
            return cls("same", None, None)
        own, other = tokenizer_of(checkpoint.directory, trust_remote_code=trust_remote_code), _of_target(target)
        if asked == "same" or own is None or other is None:
            _refuse_without_tokenizers(asked)
            return cls("same", None, None)
        if asked == "auto" and own.get_vocab() == other.get_vocab():
            return cls("same", None, None)
        shared = shared_tokens(own, other, size, target.vocab_size)
        share = len(shared) / min(target.vocab_size, len(other))
        way: Way = asked if asked != "auto" else "intersection" if share >= FEWEST_SHARED else "reencode"
        if way == "intersection" and not shared:
            raise Refusal("the two tokenizers have no token in common", '"vocabulary": "reencode"')
        return cls(way, own, other, tuple(shared))

    def __str__(self) -> str:
        found = f"the target has {len(self.target)} tokens, it has {len(self.own)}, and they share {len(self.shared)}"
        if self.way == "intersection":
            return f"{found}: it drafts these (vocabulary: intersection)"
        return f"{found}: its drafts cross over as text (vocabulary: reencode)"


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint brings one along."""
    return (directory / TOKENIZER).is_file()


def _have_same_files(own: Path, target: Path | None) -> bool:
    """Whether all that two tokenizers are read from is the same, byte for byte: then neither has to be loaded."""
    if target is None or not has_tokenizer(own):
        return False
    return all(_bytes_in(own / name) == _bytes_in(target / name) for name in TOKENIZER_FILES)


def _bytes_in(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def tokenizer_of(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a checkpoint, None without one. Where trust is left open, transformers asks the terminal."""
    if not has_tokenizer(directory):
        return None
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def _of_target(target: TargetInfo) -> Any:
    """Load the target's tokenizer. None if the target is a model object, or its checkpoint has no tokenizer.

    Nor is one loaded whose code would run: its engine alone knows whether that is trusted.
    """
    try:
        if target.checkpoint_dir is not None:
            return tokenizer_of(target.checkpoint_dir, trust_remote_code=False)
        hub_id = target.model if "/" in target.model else None
        return hub_id and AutoTokenizer.from_pretrained(hub_id, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _refuse_without_tokenizers(asked: Asked) -> None:
    if asked in ("intersection", "reencode"):
        reason = f'"vocabulary": "{asked}" compares tokenizers, and one of the checkpoints has none (tokenizer.json)'
        raise Refusal(reason, "checkpoints with their tokenizers")


def shared_tokens(own: Any, other: Any, own_size: int, other_size: int) -> list[tuple[int, int]]:
    """Pairs of ids that stand for the same bytes, by the first; ids beyond a model's table are left out.

    Special tokens meet special ones only, by their names. The smallest id stands for bytes that several have.
    """
    ours, theirs = meanings(own, own_size), meanings(other, other_size)
    first: dict[Meaning, int] = {}
    for token_id in sorted(theirs):
        first.setdefault(theirs[token_id], token_id)
    pairs: dict[Meaning, tuple[int, int]] = {}
    for token_id in sorted(ours):
        if ours[token_id] in first:
            pairs.setdefault(ours[token_id], (token_id, first[ours[token_id]]))
    return sorted(pairs.values())


def meanings(tokenizer: Any, size: int) -> dict[int, Meaning]:
    """What each id below `size` stands for, whatever the signs are that a tokenizer writes spaces and bytes with."""
    added = tokenizer.added_tokens_decoder
    named = {
        token_id: (bool(token.special), token.content.encode()) for token_id, token in added.items() if token_id < size
    }
    parts = _decoder_parts(tokenizer)
    signs = {sign: byte for byte, sign in enumerate(byte_signs())}
    for piece, token_id in tokenizer.get_vocab().items():
        if token_id < size and token_id not in named:
            named[token_id] = (False, _bytes_of(piece, parts, signs))
    return named


def _bytes_of(piece: str, parts: set[str], signs: Mapping[str, int]) -> bytes:
    if "ByteLevel" in parts and all(sign in signs for sign in piece):
        return bytes(signs[sign] for sign in piece)
    byte = _BYTE.fullmatch(piece) if "ByteFallback" in parts else None
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return (piece.replace(_SPACE_SIGN, " ") if parts & {"Metaspace", "Replace"} else piece).encode()


def _decoder_parts(tokenizer: Any) -> set[str]:
    """The kinds of steps by which a tokenizer makes text of pieces."""
    decoder = tokenizer.backend_tokenizer.decoder
    stated = {} if decoder is None else json.loads(decoder.__getstate__())
    return {each["type"] for each in [stated, *stated.get("decoders", ())] if "type" in each}


def byte_signs() -> list[str]:
    """The sign of each byte in byte-level pieces, as GPT-2 chose them: printable ones stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def draft_ids_of_target(vocabularies: Vocabularies, own_size: int, target_size: int) -> list[int]:
    """What the draft model reads for each target id: the token that both have, else the last one of its text.

    Bytes that are no text are read as an unknown token, or as the end of a text where there is none.
    """
    own = vocabularies.own
    unknown = next((each for each in (own.unk_token_id, own.eos_token_id) if each is not None), 0)
    ids = [unknown] * target_size
    for token_id, (is_special, content) in meanings(vocabularies.target, target_size).items():
        text = "" if is_special else content.decode(errors="ignore")
        pieces = own.encode(text, add_special_tokens=False)
        ids[token_id] = next((each for each in reversed(pieces) if each < own_size), unknown)
    for draft_id, target_id in vocabularies.shared:
        ids[target_id] = draft_id
    return ids


class PaddedTable:
    """Ids are the same, and the models may be padded to different sizes."""

    def __init__(self, own_size: int, target_size: int) -> None:
        self._num_rows, self._size = own_size, min(own_size, target_size)
        self._missing = target_size - self._size

    def inputs(self, token_ids: Tensor) -> Tensor:
        """The draft model's ids [M] of target ids [M]. A mask may be an id that the target lacks."""
        return token_ids.clamp(max=self._num_rows - 1)

    def logits(self, logits: Tensor) -> Tensor:
        """Logits [b, V] of [b, D]. Ids that only one of the two vocabularies is padded with are never drafted."""
        logits = logits[:, : self._size]
        return pad(logits, (0, self._missing), value=-torch.inf) if self._missing else logits


class SharedTable:
    """Tokens that both have. The draft distribution is the softmax over these alone."""

    def __init__(self, vocabularies: Vocabularies, own_size: int, target_size: int, device: torch.device) -> None:
        own, target = zip(*vocabularies.shared, strict=True)
        self._own, self._target = (torch.tensor(ids, device=device) for ids in (own, target))
        self._inputs = torch.tensor(draft_ids_of_target(vocabularies, own_size, target_size), device=device)
        self._target_size = target_size

    def inputs(self, token_ids: Tensor) -> Tensor:
        """The draft model's ids [M] of target ids [M]."""
        return self._inputs[token_ids]

    def logits(self, logits: Tensor) -> Tensor:
        """Logits [b, V] of [b, D]: -inf where the draft model has no such token."""
        nothing = logits.new_full((logits.shape[0], self._target_size), -torch.inf)
        return nothing.index_copy(1, self._target, logits[:, self._own])
