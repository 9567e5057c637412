"""Checkpoints of several modalities are served with text; images and sound are refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
from engine_helpers import make_llm
from inside import target_of
from scripts.small_models import small_config, small_model

from specdec.core.model.modalities import LeftOut
from specdec.core.request.chat import render_chat
from specdec.sdk.errors import RequestError
from specdec.sdk.packaged import packaged

OF_A_PROCESSOR = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
OF_A_TOKENIZER = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TEXT, PARTS = "two words", [{"type": "text", "text": "two words"}]
IMAGE = [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "what is it?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    small_model(small_config("llava")).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(packaged("tiny") / name, folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OF_A_PROCESSOR}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(model=folder, max_model_len=128)


def test_what_encodes_images_leaves_the_model(llm):
    model = target_of(llm).model
    left_out = [name for name, module in model.named_modules() if isinstance(module, LeftOut)]
    assert sorted(left_out) == ["model.multi_modal_projector", "model.vision_tower"]
    assert not [name for name, _ in model.named_parameters() if "vision" in name or "projector" in name]


@pytest.mark.parametrize("key", ["multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"])
def test_a_prompt_with_an_image_is_refused_by_name(llm, key):
    with pytest.raises(RequestError, match=rf"SD-E265 (.|\n)*{key}"):
        llm.generate({"prompt_token_ids": [1, 2], key: {"image": object()}})


def test_a_message_with_an_image_is_refused_by_name(llm):
    with pytest.raises(RequestError, match=r"SD-E265 (.|\n)*'image' in message 1"):
        llm.chat([{"role": "system", "content": TEXT}, {"role": "user", "content": IMAGE}])


def test_the_template_of_the_processor_renders_text(llm):
    expected = llm.engine.encode("<user>two words")
    for content in TEXT, PARTS:
        assert llm.engine.encode_chat([{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize("template", [OF_A_PROCESSOR, OF_A_TOKENIZER], ids=["parts", "text"])
@pytest.mark.parametrize("content", [TEXT, PARTS], ids=["as text", "as parts"])
def test_either_form_of_a_message_suits_either_template(llm, template, content):
    tokenizer = llm.engine.tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = template
        found = render_chat(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=False)
    finally:
        tokenizer.chat_template = before
    assert found == "<user>two words"
