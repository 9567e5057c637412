"""A smaller causal language model that drafts one token after the other."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoTokenizer

from specdec.sdk import Checkpoint, CheckpointError, Needs, ProposerConfig, Refusal, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs, ModelOptions, draft_kv_of, rows_of_tree

PARALLEL_MARK = "pard_token"
"""The configuration's key for the token of the places that a model was trained to fill in at once."""


class DraftModelOptions(ModelOptions):
    """Options of the draft_model proposer."""

    parallel_drafting: bool | None = Field(
        None,
        description="False: a model that was trained to draft in parallel (pard_token) drafts one token after the "
        "other all the same; in parallel is not implemented",
    )


class DraftModelProposer(AutoregressiveProposer):
    """Any causal language model that transformers loads and that writes the target's vocabulary.

    Speculative decoding with a draft model is due to arXiv 2211.17192 and 2302.01318.
    """

    ROWS_ARE_SHIFTED = False
    Options = DraftModelOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """Draft KV of all its layers.

        Raises Refusal if it was trained to draft in parallel and nobody said not to, if its text may not grow as long
        as the target's, or if vocabularies differ in size and only one of the two models has a tokenizer to compare
        them by; CheckpointError SD-E143 for an unreadable checkpoint.
        """
        checkpoint = cls.open_checkpoint(config)
        _check_parallel(checkpoint, config.options.parallel_drafting)
        facts = _model_config(checkpoint, config.trust_remote_code)
        longest = facts.get("max_position_embeddings")
        if longest is not None and longest < target.max_model_len:
            reason = f"the draft model serves {longest} positions, and max_model_len is {target.max_model_len}"
            raise Refusal(reason, f"max_model_len={longest}, or another draft model")
        if not _has_tokenizer(checkpoint):
            _check_size(facts["vocab_size"], target)
        return Needs(
            **cls.shared_needs(config, target),
            draft_kv=draft_kv_of(
                facts,
                num_layers=facts["num_hidden_layers"],
                rows_per_pass=rows_of_tree(config) + 1,
                dtype=config.dtype,
            ),
        )

    def build(self) -> None:
        """Load the model; its vocabulary must be the target's. Raises Refusal, before any weight is read, if not."""
        checkpoint = self.open_checkpoint(self.config)
        facts = _model_config(checkpoint, self.config.trust_remote_code)
        _check_vocabulary(checkpoint, facts["vocab_size"], self.services.tokenizer, self.target)
        self._vocab_size = min(facts["vocab_size"], self.target.vocab_size)
        self._model = self.services.load_causal_lm(checkpoint.directory, self.settings)

    def first(self, inputs: DraftInputs) -> Tensor:
        """The logits at each request's newest token."""
        return self._run(inputs)

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """The logits after one more drafted token; the model's memory is its KV alone."""
        return self._run(inputs)

    def logits(self, states: Tensor) -> Tensor:
        """The states are the logits. Ids that only one of the two vocabularies is padded with are never drafted."""
        missing = self.target.vocab_size - self._vocab_size
        logits = states[:, : self._vocab_size]
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _run(self, inputs: DraftInputs) -> Tensor:
        output = self._model(
            input_ids=inputs.token_ids.clamp(max=self._vocab_size - 1)[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.last,
            **inputs.attention,
        )
        logits: Tensor = output.logits[0]
        return logits


def _check_parallel(checkpoint: Checkpoint, asked: bool | None) -> None:
    """Raise Refusal for a model that was trained to draft in parallel, unless the user said not to; or if they ask."""
    mark = checkpoint.get(PARALLEL_MARK, int, None)
    if asked or (asked is None and mark is not None):
        trained = f"it was trained to draft in parallel ({PARALLEL_MARK}: {mark})" if mark is not None else "asked for"
        reason = f"parallel drafting with a draft model is not implemented: {trained}"
        raise Refusal(reason, '"parallel_drafting": false, which drafts one token after the other, more slowly')


def _model_config(checkpoint: Checkpoint, trust_remote_code: bool) -> dict[str, Any]:
    """The model's configuration under transformers' common names."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        because = {"because": str(error).splitlines()[0], "checkpoint": checkpoint.directory}
        raise CheckpointError("SD-E143", "transformers cannot read the draft model's configuration", because) from error
    facts: dict[str, Any] = config.to_dict()
    return facts | {name: facts[own] for name, own in config.attribute_map.items() if own in facts}


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    return (checkpoint.directory / "tokenizer.json").is_file()


def _check_size(size: int, target: TargetInfo) -> None:
    if size != target.vocab_size:
        reason = f"the draft model's vocabulary has {size} tokens, the target's {target.vocab_size}"
        raise Refusal(reason, "a draft model with the target's tokenizer")


def _check_vocabulary(checkpoint: Checkpoint, size: int, tokenizer: Any, target: TargetInfo) -> None:
    """Equal token ids where both have a tokenizer, whatever their models are padded to; else equal sizes."""
    if tokenizer is None or not _has_tokenizer(checkpoint):
        _check_size(size, target)
        return
    own: dict[str, int] = AutoTokenizer.from_pretrained(checkpoint.directory).get_vocab()
    theirs: dict[str, int] = tokenizer.get_vocab()
    different = [token for token, token_id in own.items() if theirs.get(token) != token_id]
    if different or len(own) != len(theirs):
        token = min(different, default="", key=lambda token: own[token])
        found = f"; token {token!r} is {own[token]} there and {theirs.get(token)} here" if different else ""
        reason = f"its tokenizer has {len(own)} tokens and the target's {len(theirs)}{found}"
        raise Refusal(reason, "a draft model with the target's tokenizer")
