"""A smaller causal language model that drafts one token after the other, or in parallel if it was trained to."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import Field
from torch import Tensor
from transformers import AutoConfig

from specdec.sdk import Draft, Needs, ProposerConfig, Refusal, StepView, TargetInfo
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError
from specdec.sdk.extensions import Graphs, Networks
from specdec.sdk.model_proposer import (
    DraftInputs,
    MaskedOptions,
    MaskedProposer,
    mask_token_id,
)
from specdec.sdk.model_proposer.kv_shape import require_positions

from .as_text import Crossing
from .pard2 import Pard2Spec, TargetTerm
from .reencode import SPARE_ROWS, TextDrafter
from .vocabularies import Asked, PaddedTable, SharedTable, Vocabularies, has_tokenizer, tokenizer_of

logger = logging.getLogger(__name__)


class DraftModelOptions(MaskedOptions):
    """Options of the draft_model proposer."""

    vocabulary: Asked = Field(
        default="auto",
        description="a draft model with another tokenizer drafts the tokens that both have (intersection), or its "
        "drafts cross over as text (reencode). auto: what the tokenizers have in common decides. same: it is refused",
    )


class DraftModelProposer(MaskedProposer):
    """Any causal language model that transformers loads, with the target's tokenizer or another (`Vocabularies`).

    Speculative decoding with a draft model is due to arXiv 2211.17192 and 2302.01318. A model whose configuration
    states a `pard_token` drafts in parallel (PARD, arXiv 2504.18583). PARD-2 models read the target's hidden states.
    """

    DRAFTS_TREES = True
    INPUTS_ARE_SHIFTED = False
    Options = DraftModelOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """Draft KV of all its layers, and for PARD-2 the hidden states that the checkpoint names.

        Raises Refusal if it was not trained for the way of drafting that is asked for, if its text may not grow as long
        as the target's, or not with the same rotary tables, if vocabularies differ in size and only one of the two
        models has a tokenizer to compare them by, or if there is no way between them as asked; CheckpointError: SD-E143
        for an unreadable checkpoint, SD-E170, SD-E171.
        """
        checkpoint = cls.open_checkpoint(config)
        facts = _model_config(checkpoint, config.network.trust_remote_code)
        mask = _mask_of(checkpoint, config.options.parallel_drafting, facts["vocab_size"])
        term = Pard2Spec.read(checkpoint, target)
        if term is not None and mask is None:
            raise Refusal("a PARD-2 model drafts in parallel only", '"parallel_drafting": true, and a "pard_token"')
        longest = facts.get("max_position_embeddings")
        if longest is not None and longest < target.max_model_len:
            reason = f"the draft model serves {longest} positions, and max_model_len is {target.max_model_len}"
            raise Refusal(reason, f"max_model_len={longest}, or another draft model")
        require_positions(facts, target)
        vocabularies = _vocabularies(checkpoint, config, facts["vocab_size"], target)
        if vocabularies.way != "same" and mask is not None:
            reason = f"it drafts in parallel, which takes the target's tokenizer, and {vocabularies}"
            raise Refusal(reason, '"parallel_drafting": false, or a draft model with the target\'s tokenizer')
        if not has_tokenizer(checkpoint.directory):
            _check_size(facts["vocab_size"], target)
        as_text = vocabularies.way == "reencode"
        if as_text and config.options.follow_grammars:
            reason = f"follow_grammars takes tokens of the target, and {vocabularies}"
            raise Refusal(reason, '"follow_grammars": false, or a draft model with the target\'s tokenizer')
        kv = cls.draft_kv(config, facts)
        if as_text:
            kv = kv.replace(lookahead=kv.lookahead + SPARE_ROWS)
            # Its KV lies by its own tokens, so that a block of the target's has no text of its own there.
            return Needs(history=True, whole_prompt=True, state="per_request", extensions=(kv, Networks(), Graphs()))
        ahead = cls.ahead_needs(config, target, kv) if mask is None and term is None else None
        return ahead or cls.shared_needs(config, target, kv, hidden_states=() if term is None else term.hidden_states)

    def build(self) -> None:
        """Load the model, and find the way from its vocabulary to the target's. Raises Refusal before weights are."""
        checkpoint = self.open_checkpoint(self.config)
        facts = _model_config(checkpoint, self.config.network.trust_remote_code)
        size, target = facts["vocab_size"], self.target
        vocabularies = _vocabularies(checkpoint, self.config, size, target)
        if vocabularies.way == "same":
            own = tokenizer_of(checkpoint.directory, trust_remote_code=self.config.network.trust_remote_code)
            _check_vocabulary(own, size, self.services.tokenizer, target)
        else:
            logger.warning("the draft model %s has another tokenizer: %s", checkpoint.directory, vocabularies)
        self.mask_token_id = _mask_of(checkpoint, self.config.options.parallel_drafting, size)
        self._model = self.services.load_causal_lm(checkpoint.directory, self.settings)
        self._embed, spec = self._model.get_input_embeddings(), Pard2Spec.read(checkpoint, target)
        self._term = None if spec is None else self._loaded_term(spec, checkpoint, facts["hidden_size"])
        self._table: PaddedTable | SharedTable = PaddedTable(size, target.vocab_size)
        self._by_text: TextDrafter | None = None
        if vocabularies.way == "intersection":
            self._table = SharedTable(vocabularies, size, target.vocab_size, self.services.device)
        elif vocabularies.way == "reencode":
            self._by_text = self._text_drafter(vocabularies, size, facts.get("max_position_embeddings"))

    def _text_drafter(self, vocabularies: Vocabularies, size: int, longest: int | None) -> TextDrafter:
        crossing = Crossing(vocabularies.own, vocabularies.target, size, self.target.vocab_size)
        longest = min(self.target.max_model_len, longest or self.target.max_model_len)
        kv, num_rows = self.services.draft_kv(), self.config.num_draft_tokens + SPARE_ROWS
        return TextDrafter(crossing, kv, self._logits, num_rows, longest, self.services.device)

    def _loaded_term(self, spec: Pard2Spec, checkpoint: Checkpoint, width: int) -> TargetTerm:
        term = TargetTerm(spec, self.target.hidden_size, width)
        term.load(checkpoint)
        self.services.finish(term, self.settings)
        return term

    def observe(self, step: StepView) -> None:
        """Run the committed tokens; a model that reads text does so when it drafts."""
        if self._by_text is None:
            super().observe(step)

    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        return super().propose(step) if self._by_text is None else self._by_text.propose(step)

    def first(self, inputs: DraftInputs) -> Tensor:
        """The logits at each request's newest token."""
        return self._run(inputs)

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """The logits after one more drafted token; the model's memory is its KV alone."""
        return self._run(inputs)

    def logits(self, states: Tensor) -> Tensor:
        """The states are the draft model's logits."""
        return self._table.logits(states)

    def _run(self, inputs: DraftInputs) -> Tensor:
        token_ids = self._table.inputs(inputs.token_ids)
        return self._logits(DraftInputs(token_ids, inputs.positions, inputs.hidden, inputs.last, inputs.attention))

    def _logits(self, inputs: DraftInputs) -> Tensor:
        """The model's own logits [b, D] of its own ids [M]."""
        output = self._model(
            **self._read(inputs.token_ids[None], inputs.hidden),
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.last,
            **inputs.attention,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _read(self, token_ids: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """What the model reads: tokens, or for PARD-2 their embeddings with the term of the target."""
        if self._term is None or hidden is None:
            return {"input_ids": token_ids}
        embedded = self._embed(token_ids)
        return {"inputs_embeds": embedded + self._term(hidden.to(embedded.dtype))[None]}


def _mask_of(checkpoint: Checkpoint, asked: bool | None, num_rows: int) -> int | None:
    """The token of the mask, None to draft one token after the other. Raises Refusal for a mask that is not there."""
    mask = None if asked is False else mask_token_id(checkpoint)
    if mask is None and asked:
        reason = "parallel_drafting is true, and the checkpoint has no pard_token to draft in parallel with"
        raise Refusal(reason, '"parallel_drafting": false, or a model trained for it (PARD)')
    if mask is not None and not 0 <= mask < num_rows:
        reason = f"its mask token {mask} has no row in an embedding of {num_rows} rows"
        raise Refusal(reason, "the checkpoint with its own config.json")
    return mask


def _model_config(checkpoint: Checkpoint, trust_remote_code: bool) -> dict[str, Any]:
    """The configuration of what reads text, under transformers' common names: models may read images too."""
    try:
        whole = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=trust_remote_code)
        config = whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
    except Exception as error:  # the library checks each field, and has errors of its own for it
        because = {"because": str(error).partition("\n")[0], "checkpoint": checkpoint.directory}
        raise CheckpointError("SD-E143", "transformers cannot read the draft model's configuration", because) from error
    facts: dict[str, Any] = config.to_dict()
    return facts | {name: facts[own] for name, own in config.attribute_map.items() if own in facts}


def _vocabularies(checkpoint: Checkpoint, config: ProposerConfig, size: int, target: TargetInfo) -> Vocabularies:
    trusts = config.network.trust_remote_code
    return Vocabularies.choose(checkpoint, size, target, config.options.vocabulary, trust_remote_code=trusts)


def _check_size(size: int, target: TargetInfo) -> None:
    if size != target.vocab_size:
        reason = f"the draft model's vocabulary has {size} tokens, the target's {target.vocab_size}"
        raise Refusal(reason, "a draft model with the target's tokenizer")


def _check_vocabulary(tokenizer: Any, size: int, targets: Any, target: TargetInfo) -> None:
    """Equal token ids where both have a tokenizer, whatever their models are padded to; else equal sizes."""
    if tokenizer is None or targets is None:
        _check_size(size, target)
        return
    own: dict[str, int] = tokenizer.get_vocab()
    theirs: dict[str, int] = targets.get_vocab()
    different = [token for token, token_id in own.items() if theirs.get(token) != token_id]
    if different or len(own) != len(theirs):
        token = min(different, default="", key=lambda token: own[token])
        found = f"; token {token!r} is {own[token]} there and {theirs.get(token)} here" if different else ""
        reason = f"its tokenizer has {len(own)} tokens and the target's {len(theirs)}{found}"
        raise Refusal(reason, 'a draft model with the target\'s tokenizer, or "vocabulary": "auto"')
