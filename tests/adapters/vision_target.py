"""The tiny target behind the eyes of a Qwen3-VL: trained text, random vision, and positions of three axes (M-RoPE)."""

from __future__ import annotations

import json
import shutil

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3VLConfig

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # in place of reserved ones
FIRST_ID = 4085
START, END, IMAGE, VIDEO = range(FIRST_ID, FIRST_ID + len(VISION_TOKENS))
PATCH, MERGE = 14, 2
PIXELS = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": (PATCH * MERGE * 4) ** 2}  # of a whole image
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "eos_token_id",
)
"""Settings of the tiny target's that a Qwen3-VL has too."""


def save(source, directory):
    """A checkpoint whose language model is that of `source`, a folder of the tiny target. Returns `directory`."""
    directory.mkdir(exist_ok=True)
    text = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(_config(text.config), dtype=torch.float32)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.save_pretrained(directory)
    _save_processors(source, directory)
    return directory


def _config(text):
    kept = {name: getattr(text, name) for name in KEPT}
    rope = text.rope_parameters | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 2, "patch_size": PATCH}
    vision |= {"out_hidden_size": text.hidden_size, "num_position_embeddings": 64, "spatial_merge_size": MERGE}
    return Qwen3VLConfig(
        text_config=kept | {"rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )


def _save_processors(source, directory):
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, directory / name)
    words = (source / "tokenizer.json").read_text()
    for number, token in enumerate(VISION_TOKENS):
        words = words.replace(f"<|reserved_{number}|>", token)
    (directory / "tokenizer.json").write_text(words)
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": PIXELS}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"} | sizes
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"} | sizes
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
