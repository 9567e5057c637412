"""Conversations as text, through the template of a tokenizer or of a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.sdk.errors import RequestError

from .prompts import require_messages, require_unicode

Message = Mapping[str, Any]

_REPEATED = "'type': 'text'"  # how a list of parts looks where a template wants a text


def render_chat(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The text of a conversation. A message's content is a text, or a list of parts `{"type": "text", "text": ...}`.

    Templates of processors read parts and those of tokenizers a text: what is given is tried first, then the other.
    Raises RequestError: SD-E159 without a template, SD-E211 for messages that it does not render, SD-E265 for parts
    that are no text.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise RequestError("SD-E159", "chat needs a tokenizer with a chat template; this model has none")
    require_messages(messages)
    for number, message in enumerate(messages):
        _require_text(number, message.get("content"))
    texts, errors = [], []
    for form in messages, [_in_other_form(each) for each in messages]:
        try:
            texts.append(_rendered(tokenizer, form, add_generation_prompt))
        except RequestError as error:
            errors.append(error)
        if texts and _says(texts[-1], messages):
            return texts[-1]
    if not texts:
        raise errors[0]
    return texts[0]


def encode_chat(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation in the model's template. Raises RequestError: see `render_chat`, and SD-E212."""
    text = render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    require_unicode(text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _require_text(number: int, content: Any) -> None:
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            facts = {"found": f"a part of type {kind!r} in message {number}", "fix": "leave out all but text"}
            raise RequestError("SD-E265", "images, sound and video are not served", facts)
        if not isinstance(part.get("text"), str):
            facts = {"expected": '{"type": "text", "text": ...}', "found": f"{part!r:.80}"}
            raise RequestError("SD-E211", f"message {number} has a part without a text", facts)


def _rendered(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # whatever the template, which came with the model, makes of these messages
        facts = {"because": f"{type(error).__name__}: {error}", "found": f"{messages!r:.80}"}
        raise RequestError("SD-E211", "the chat template does not render these messages", facts) from error
    return text


def _says(rendered: str, messages: Sequence[Message]) -> bool:
    """Whether the text of every user is there: templates leave out what they do not find."""
    said = (_text_of(each.get("content")).strip() for each in messages if each.get("role") == "user")
    return _REPEATED not in rendered and all(text in rendered for text in said)


def _text_of(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _in_other_form(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return {**message, "content": _text_of(content)} if isinstance(content, list | tuple) else message
