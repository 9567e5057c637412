"""Draft models with other tokenizers than the packaged target: made of `tiny/draft`, or small with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from plugin_helpers import TINY
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

DRAFT = TINY / "draft"


def fewer_tokens(folder: Path, num_kept: int, num_foreign: int = 0) -> Path:
    """`tiny/draft` with the first tokens of its tokenizer in another order; the rows of its table go with them.

    Byte-level merges are made of earlier tokens, so that this is a whole tokenizer and a trained model. num_foreign:
    tokens that the target lacks, which the model says rather than some frequent ones that both have.
    """
    folder.mkdir()
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, specials = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    old_ids = vocabulary | {each["content"]: each["id"] for each in specials}
    names = [each["content"] for each in specials]
    kept = [piece for piece in sorted(vocabulary, key=vocabulary.get) if piece not in names][:num_kept]
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).tolist()
    foreign = {f"zq{place}": kept[300 + place] for place in range(num_foreign)}
    new_ids = {piece: place for place, piece in enumerate([*(kept[i] for i in order), *foreign, *names])}
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [each for each in merges if {*each, "".join(each)} <= set(kept)]
    tokenizer["model"]["vocab"] = {piece: new_ids[piece] for piece in new_ids if piece in {*vocabulary, *foreign}}
    for each in specials:
        each["id"] = new_ids[each["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(DRAFT / "tokenizer_config.json", folder)
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    rows = [old_ids[foreign.get(piece, piece)] for piece in new_ids]
    table = model.get_input_embeddings().weight.data[rows].clone()
    table[[new_ids[piece] for piece in foreign]] *= 1.5
    _save(model, folder, len(new_ids), table, new_ids["<|endoftext|>"])
    return folder


def random_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model of `tiny/draft`'s form with random rows for a tokenizer."""
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    table = 0.05 * torch.randn(len(tokenizer), model.config.hidden_size, generator=generator)
    _save(model, folder, len(tokenizer), table, tokenizer.eos_token_id)
    return folder


def _save(model, folder, size, table, end):
    model.resize_token_embeddings(size)
    model.get_input_embeddings().weight.data.copy_(table)
    model.config.eos_token_id, model.config.pad_token_id = end, None
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)


def sentencepiece_like(texts, kind="bpe", size=600) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece, trained on texts: spaces are U+2581, bytes are <0x0A>."""
    specials = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*specials, *bytes_], show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=[*specials, *bytes_], unk_token="<unk>", show_progress=False
        )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator((line for text in texts for line in text.split(". ")), trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
