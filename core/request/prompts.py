"""What a user may hand over as a prompt or a conversation, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.sdk.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]

_OTHER_MODALITIES = "multi_modal", "mm_"  # how the keys begin that vLLM's prompts have for them


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt. Raises RequestError: SD-E153 without a tokenizer, SD-E212 for what is no text."""
    if tokenizer is None:
        facts = {"fix": "pass prompt_token_ids, or LLM(tokenizer=...)"}
        raise RequestError("SD-E153", "the prompt is text, and the model has no tokenizer", facts)
    require_unicode(text)
    return list(tokenizer(text)["input_ids"])


def read_prompt(prompt: Prompt, request_id: str, encode: Callable[[str], list[int]]) -> tuple[str | None, list[int]]:
    """The text, if it is one, and token ids. Raises RequestError SD-E152, SD-E265."""
    if isinstance(prompt, Mapping):
        others = sorted(key for key in prompt if str(key).startswith(_OTHER_MODALITIES))
        if others:
            facts = {"found": ", ".join(others), "fix": "leave them out; text is served"}
            raise RequestError("SD-E265", f"request {request_id!r}: images, sound and video are not served", facts)
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(
                "SD-E152",
                f"request {request_id!r}: a prompt mapping has one key, 'prompt', 'prompt_token_ids' or 'messages'",
                {"found": ", ".join(map(repr, prompt))},
            )
        (prompt,) = prompt.values()
    if isinstance(prompt, str):
        return prompt, encode(prompt)
    if isinstance(prompt, Sequence) and all(type(token_id) is int for token_id in prompt):
        return None, [int(token_id) for token_id in prompt]
    raise RequestError(
        "SD-E152",
        f"request {request_id!r}: a prompt is a text or a list of token ids",
        {"found": f"{type(prompt).__name__}: {prompt!r:.80}"},
    )


def require_messages(messages: Any) -> None:
    """Raise RequestError SD-E211 for what is no conversation: templates leave out what they do not find."""
    expected = 'a list of {"role": ..., "content": ...}'
    listed = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not listed or not messages or not all(isinstance(each, Mapping) for each in messages):
        facts = {"expected": expected, "found": f"{type(messages).__name__}: {messages!r:.80}"}
        raise RequestError("SD-E211", "this is no conversation", facts)
    for number, each in enumerate(messages):
        missing = [key for key in ("role", "content") if key not in each]
        if missing and "tool_calls" not in each:
            facts = {"expected": expected, "found": f"{each!r:.80}"}
            raise RequestError("SD-E211", f"message {number} has no {' and no '.join(missing)}", facts)


def require_unicode(text: str) -> None:
    """Raise RequestError SD-E212 for half a surrogate pair, which bytes that are no UTF-8 become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        facts = {
            "found": f"character {error.start}: {text[error.start]!a}",
            "fix": "decode it as what it is",
        }
        raise RequestError("SD-E212", "the prompt is no Unicode text", facts) from error


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Read one prompt or several. A list of ints is one. Raises RequestError SD-E152 for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        facts = {
            "expected": "a text, a list of token ids, a mapping, or a list of these",
            "found": f"{type(prompts).__name__}: {prompts!r:.80}",
            "fix": "an array or tensor of ids becomes a prompt with .tolist(), bytes with .decode()",
        }
        raise RequestError("SD-E152", "this is no prompt and no list of prompts", facts)
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # token ids: one prompt
    return list(prompts)  # type: ignore[arg-type]
