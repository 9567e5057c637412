"""The base of proposers that run a network of their own."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..checkpoint import Checkpoint
from ..config import NetworkSettings, ProposerConfig, StrictModel
from ..errors import CheckpointError, Refusal
from ..extensions import Extension, Grammars, Graphs, Networks, NewWeights, Trees
from ..needs import DistributionForm, Needs, needs_of
from ..proposer_protocol import ProposerBase
from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .draft_masks import DraftMasks
from .sampling import COLUMN_DTYPES, DraftSampler
from .updates import UpdatedServices, copy_networks, other_parts
from .vocabulary import DraftVocabulary
from .warm_up import WarmUp
from .weights import Weights, linear_of

logger: logging.Logger = logging.getLogger("specdec")


class ModelOptions(StrictModel):
    """Options of every model-based proposer."""

    draft_distribution: Literal["sparse", "dense"] = Field(
        default="sparse",
        description="what a probabilistic draft reports: its most likely tokens, or the whole vocabulary",
    )
    sparse_top_m: int = Field(default=256, ge=1, description="tokens that a sparse draft distribution keeps")
    follow_grammars: bool = Field(
        default=False,
        description="whether tokens are drawn under the grammar of a request for structured output; chains only",
    )


class ModelProposer(ProposerBase):
    """Loads a draft network at `bind` and draws drafts from its logits.

    A subclass states its needs (start from `shared_needs`), builds its network in `build`, and implements `propose`,
    and `observe` if it keeps draft KV. AutoregressiveProposer and ParallelProposer are the two usual ways.
    """

    Options: type[ModelOptions] = ModelOptions

    default_model: ClassVar[str | None] = None
    """The checkpoint if `model` is not given: a directory, "tiny/NAME" or a hub id. None means that one is required."""

    DRAFTS_TREES: ClassVar[bool] = False
    """Whether `max_nodes` is served: the loops of this package draft trees then, and no method draws its own."""

    vocabulary: DraftVocabulary | None = None
    """The draft vocabulary, set in `build`. None means the target's."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.options: ModelOptions = config.options
        self.settings: NetworkSettings = config.network
        self.target: TargetInfo
        self.services: Services
        self._updates: dict[str, Tensor] = {}  # tensors in the place of the checkpoint's

    @classmethod
    def shared_needs(
        cls,
        config: ProposerConfig,
        target: TargetInfo,
        *extensions: Extension,
        vocabulary: DraftVocabulary | None = None,
        **declared: Any,
    ) -> Needs:
        """The needs that follow from the configuration, and those that a subclass adds.

        The configuration decides about placement, distribution and sampling fields, and about the extensions of this
        base: networks, graphs, new weights where they are offered, trees and grammars where they are asked for.
        vocabulary: the draft vocabulary. None means the target's.
        extensions, declared: the subclass's own, such as DraftKV(...) and hidden_states=("final",).

        On a CPU the compacted host form is cheapest. Elsewhere the device form is, because its shapes do not depend on
        acceptance.
        """
        asked: list[Extension] = [Networks(), Graphs()]
        if NewWeights.id in target.extensions:
            asked.append(NewWeights())
        if config.options.follow_grammars:
            asked.append(Grammars())
            if config.max_nodes is not None:
                raise Refusal("trees are drawn without grammars", '"follow_grammars": false, or no max_nodes')
        if config.max_nodes is not None and cls.DRAFTS_TREES:
            asked.append(Trees())
        shared: dict[str, Any] = {
            "placement": "host" if target.device == "cpu" else "device",
            "extensions": (*asked, *extensions),
        }
        form = distribution_form(config)
        if form != "one_hot":
            shared |= {"distributions": (form,), "sampling": tuple(COLUMN_DTYPES)}
        if form == "sparse":
            shared["sparse_top_m"] = min(config.options.sparse_top_m, target.vocab_size)
        elif form == "dense" and vocabulary is not None:
            shared["draft_vocabulary"] = tuple(vocabulary.target_ids.tolist())
        return Needs(**(shared | declared))

    @classmethod
    def open_checkpoint(cls, config: ProposerConfig) -> Checkpoint:
        """The checkpoint of `model`, or the default.

        Raises CheckpointError: SD-E133 if there is neither, and the errors of `Checkpoint.open`.
        """
        return cls._checkpoint(config.model)

    @classmethod
    def _checkpoint(cls, model: str | None) -> Checkpoint:
        model = model or cls.default_model
        if model is None:
            facts = {"fix": 'add "model": a checkpoint directory or hub id'}
            raise CheckpointError("SD-E133", f"{cls.__name__} needs a draft checkpoint", facts)
        return Checkpoint.open(model)

    @classmethod
    def draft_tokens_of(cls, model: str | None) -> int | None:
        """K that the checkpoint itself proposes, in the `speculators` format.

        None means that it proposes none, or that there is no checkpoint: `needs` says what is wrong with one.
        """
        with suppress(CheckpointError):
            checkpoint = cls._checkpoint(model)
            methods = checkpoint.get("speculators_config.proposal_methods", list, [])
            first = methods[0] if methods else {}
            return first.get("speculative_tokens") if isinstance(first, Mapping) else None
        return None

    default_draft_tokens: int | Callable[..., int | None] | None = draft_tokens_of
    """The default K of the class. A number takes the place of what a checkpoint proposes."""

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Keep the target's facts and the services, and build the network."""
        self.target, self.services = target, services
        with torch.inference_mode(False), torch.no_grad():
            self.build()

    @abstractmethod
    def build(self) -> None:
        """Make the network from the checkpoint, with `self.services` and `self.settings`."""

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the place of the checkpoint's of the same names. Others stay as they are.

        A second proposer is built with them, and its networks are copied into these. A network is an `nn.Module` in an
        attribute; what `build` computes of weights belongs into its parameters and buffers. Draft KV stays as it is.

        Raises ConfigError, and changes nothing: SD-E228 for names, shapes, dtypes and values that do not fit, SD-E229
        where the network would be made of other parts.
        """
        new = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        updates = self._updates | new  # kept for later ones, on the host: the cache fills the device
        updated, services = type(self)(self.config), UpdatedServices(self.services, updates)
        updated.target, updated.services = self.target, services
        with torch.inference_mode(False), torch.no_grad():
            updated.build()
            services.require_known()
            if _ids(updated.vocabulary) != _ids(self.vocabulary):
                raise other_parts(["the draft vocabulary"])
            copy_networks(vars(self), vars(updated))
        self._updates = updates

    def warmup(self) -> None:
        """Observe and draft for made-up steps where the engine compiles: nothing is left to compile for requests.

        A device compiles kernels: there each step is observed, and the first one drafted for.
        What a subclass learns at `observe` it would learn from them too: it gives its own then. Where one cannot be
        done, a log entry says so, and forms are compiled when they first come.
        """
        needs = needs_of(type(self), self.config, self.target)
        if needs.extension(Graphs) is None:
            return
        is_compiled = self.services.compile(self.build) != self.build  # the function itself: nothing is compiled
        if not is_compiled and torch.device(self.target.device).type == "cpu":
            return
        try:
            warm_up = WarmUp(needs, self.target, self.config.width, self.services.dtype)
            for index, step in enumerate(warm_up.steps()):
                self.observe(step)
                for asked in warm_up.budgets(step) if is_compiled or not index else ():
                    self.propose(asked)
        except Exception as error:  # of the author's code, on steps that no engine ran
            reason = f"{type(error).__name__}: {error}"
            logger.info("%s is compiled while requests run, as its warm-up raised %s", type(self).__name__, reason)

    @abstractmethod
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""

    def load_weights(self) -> Weights:
        """The checkpoint's tensors. Raises as `open_checkpoint` and `Services.load_tensors` do."""
        directory = self.open_checkpoint(self.config).directory
        return Weights(self.services.load_tensors(directory), directory)

    def load_embedding(self, weights: Weights, width: int = -1, name: str = "embed_tokens.weight") -> torch.nn.Module:
        """The drafter's input embedding [..., width] of target ids: its own, or the target's.

        If the checkpoint has no table, or its table equals the target's, the target's is used and nothing is copied.

        width: the width of the table. -1 means any width.
        name: the tensor's name in the checkpoint.

        Raises CheckpointError: SD-E172 if there is none and the target's has another width, SD-E175 for another shape.
        """
        take = weights.take_if_there if width in (-1, self.target.hidden_size) else weights.take
        table = take(name, self.target.vocab_size, width)
        if table is None or self._is_targets(table):
            return TargetEmbedding(self.services)
        own: torch.nn.Module = torch.nn.Embedding.from_pretrained(table)  # type: ignore[no-untyped-call]
        return own

    def load_head(
        self,
        weights: Weights,
        width: int,
        num_ids: int,
        name: str = "lm_head.weight",
        logit_scale: float | None = None,
    ) -> torch.nn.Module:
        """The drafter's output head [..., D] on states [..., width]: its own, or the target's.

        width: the width of the states.
        num_ids: D, the size of the draft vocabulary.
        name: the tensor's name in the checkpoint.
        logit_scale: the factor that the draft checkpoint states (`Checkpoint.logit_scale`). None means the target's
            factor for the target's head, and 1 for the drafter's own.

        Raises CheckpointError SD-E172 if there is no head of its own and the target's has another vocabulary or width.
        """
        whole = num_ids == self.target.vocab_size and width == self.target.hidden_size
        matrix = weights.take_if_there(name, num_ids, width) if whole else weights.take(name, num_ids, width)
        if matrix is None:
            return TargetHead(self.services, logit_scale)
        own = linear_of(matrix)
        return own if logit_scale is None or logit_scale == 1 else ScaledHead(own, logit_scale)

    def sampler(self, step: StepView, chosen: Tensor | None) -> DraftSampler:
        """A sampler for this step's drafts.

        chosen: places in the step that want drafts, [b]. None means all.
        """
        follows = self.options.follow_grammars
        return DraftSampler(
            step,
            chosen,
            distribution_form(self.config),
            sparse_top_m=min(self.options.sparse_top_m, self.target.vocab_size),
            vocabulary=self.vocabulary,
            masks=DraftMasks.of(self.services, step, chosen) if follows else None,
        )

    def wanted(self, step: StepView) -> Tensor | None:
        """The places in the step with a budget, [b]. None means all.

        On a device the answer would need a wait. So every row is drafted, and the lengths cut it.
        """
        if step.budget.device.type != "cpu":
            return None
        places = step.budget.nonzero()[:, 0]
        return None if len(places) == len(step) else places

    @staticmethod
    def most_wanted(step: StepView) -> int:
        """The largest budget of the step, 0 in an empty one. On a device it is K, so that nothing waits."""
        if step.budget.device.type != "cpu":
            return step.width if len(step) else 0
        return max(step.budget.tolist(), default=0)

    def _is_targets(self, table: Tensor) -> bool:
        if table.shape[1] != self.target.hidden_size:
            return False
        ids = torch.arange(len(table), device=table.device)
        targets = self.services.embed(ids)
        return torch.equal(table.to(targets.dtype), targets)


SCALED_EMBEDDINGS = ("gemma", "vaultgemma", "paligemma")
"""How model types begin whose embedding scales its rows; recurrent_gemma scales them behind it."""


class TargetEmbedding(torch.nn.Module):
    """The target's embedding, by reference: its rows alone, which draft networks are trained on."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._embed, self._factor = services.embed, _embedding_factor(services)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        rows = self._embed(token_ids)
        return rows if self._factor == 1 else rows / self._factor


class TargetHead(torch.nn.Module):
    """The target's head by reference, with a factor on its logits.

    logit_scale: the factor. None means the target's.
    """

    def __init__(self, services: Services, logit_scale: float | None = None) -> None:
        super().__init__()
        self._head, self._dtype = services.lm_head, services.dtype
        self._scale = services.logit_scale if logit_scale is None else logit_scale

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        logits = self._head(hidden.to(self._dtype))
        return logits if self._scale == 1 else logits * self._scale


class ScaledHead(torch.nn.Module):
    """A head whose logits are multiplied by a factor."""

    def __init__(self, head: torch.nn.Module, logit_scale: float) -> None:
        super().__init__()
        self.head: torch.nn.Module = head
        self._scale = logit_scale

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits * self._scale


def _embedding_factor(services: Services) -> float:
    """What the target's embedding multiplies its rows by. Gemma does so, and no key of its configuration tells."""
    if not str(services.target.config.get("model_type")).startswith(SCALED_EMBEDDINGS):
        return 1.0
    return torch.tensor(services.target.hidden_size**0.5, dtype=services.dtype).item()  # rounded as there


def _ids(vocabulary: DraftVocabulary | None) -> list[int] | None:
    return None if vocabulary is None else vocabulary.target_ids.tolist()


def distribution_form(config: ProposerConfig) -> DistributionForm:
    """The form of distribution that this configuration's drafts report."""
    return "one_hot" if config.draft_sample_method == "greedy" else config.options.draft_distribution
