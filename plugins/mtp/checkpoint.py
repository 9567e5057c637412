"""A multi-token-prediction module, whoever published it, as one specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.sdk import ProposerConfig, Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, require_target
from specdec.sdk.errors import CheckpointError

from .layouts import BLOCK_RECYCLING_TYPES, LAYOUTS, MtpLayout, Recycled, find_modules, unserved_layout

_QUANTISED = (".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", ".qzeros")


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """What the module is, where its tensors are, and how it was trained to be run."""

    checkpoint: Checkpoint
    layout: MtpLayout
    indices: tuple[int, ...]  # of the modules that draft, among the checkpoint's: of the first K
    num_modules: int  # that are stored, and may draft
    decoder: Mapping[str, Any]  # the configuration of their layers, one each, under transformers' names
    hidden_size: int
    has_bias: bool  # of the projection
    recycled: Recycled

    @classmethod
    def read(cls, config: ProposerConfig, target: TargetInfo) -> MtpSpec:
        """Read config.json and the tensors' names and shapes: nothing else tells the layouts apart.

        Raises Refusal if there is no such module or its layout is not implemented; CheckpointError: SD-E105, SD-E146,
        SD-E170, SD-E171.
        """
        checkpoint = Checkpoint.open(config.model or target.checkpoint_dir or target.model)
        shapes = checkpoint.shapes
        unserved, found = unserved_layout(shapes), find_modules(shapes)
        if unserved is not None:
            layout_name, why = unserved
            reason = f"the layout {layout_name} of multi-token-prediction weights is not implemented: {why}"
            raise Refusal(reason, _served())
        if found is None:
            raise _no_module(checkpoint)
        layout, numbers = found
        num_modules = _num_modules(layout, numbers, config, checkpoint)
        indices = tuple(numbers[: min(num_modules, config.num_draft_tokens)])
        stem = (layout.prefix + layout.parts["projection"]).format(index=indices[0])
        _refuse_quantised([name for name in shapes for index in indices if name.startswith(layout.prefixes(index))])
        own = checkpoint.get("transformer_layer_config", dict, None)
        layer_config = target.config if own is None else own
        shape = shapes[stem + ".weight"]
        _check_fits(shape, layer_config, target)
        return cls(
            checkpoint=checkpoint,
            layout=layout,
            indices=indices,
            num_modules=num_modules,
            decoder=module_layers(layer_config, sparse=[layout.has_experts(shapes, index) for index in indices]),
            hidden_size=shape[0],
            has_bias=f"{stem}.bias" in shapes,
            recycled=config.options.recycled_hidden or _recycled(layout, layer_config),
        )


def module_layers(config: Mapping[str, Any], *, sparse: Sequence[bool]) -> dict[str, Any]:
    """A decoder's configuration with one layer for each module, in the place of the target's layers.

    They have full attention where the target has any, and experts where `sparse` says so. Every key that assigns kinds
    of layers by their number is set for these. Raises Refusal for modules of both kinds, where no list can say so.
    """
    count, kinds = len(sparse), config.get("layer_types") or ["full_attention"]
    if len(set(sparse)) > 1 and "mlp_layer_types" not in config:
        raise Refusal("some of its modules have experts and some have none, which its type of layer cannot say")
    ours = {
        "layer_types": ["full_attention" if "full_attention" in kinds else kinds[-1]] * count,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "first_k_dense_replace": 0 if sparse[0] else count,
        "mlp_only_layers": [] if sparse[0] else list(range(count)),
        "decoder_sparse_step": 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 0 if sparse[0] else count,
        "moe_layer_end_index": count - 1,
    }
    return {**config, **{key: value for key, value in ours.items() if key in config}, "num_hidden_layers": count}


def _num_modules(layout: MtpLayout, numbers: list[int], config: ProposerConfig, checkpoint: Checkpoint) -> int:
    """How many of the stored modules draft. Raises Refusal for more drafts than several modules have."""
    usable = 1 if layout.shares_projection else len(numbers)
    asked: int = config.options.num_modules or usable
    if asked > usable:
        reason = f"num_modules is {asked}, and {str(checkpoint.directory)!r} has {usable} that can draft"
        raise Refusal(reason, f'"num_modules": {usable}')
    if 1 < asked < config.num_draft_tokens:
        reason = f"num_speculative_tokens is {config.num_draft_tokens}, and each of {asked} modules drafts one token"
        raise Refusal(reason, f'"num_speculative_tokens": {asked}, or "num_modules": 1, which drafts every token')
    return asked


def _recycled(layout: MtpLayout, layer_config: Mapping[str, Any]) -> Recycled:
    return "block" if layer_config.get("model_type") in BLOCK_RECYCLING_TYPES else layout.recycled


def _check_fits(projection: tuple[int, ...], layer_config: Mapping[str, Any], target: TargetInfo) -> None:
    """`projection` is that tensor's shape, [H, 2H]."""
    if len(projection) != 2 or projection[1] != 2 * projection[0]:
        facts = {"expected": "a projection [H, 2H]", "found": list(projection)}
        raise CheckpointError("SD-E175", "the draft checkpoint's projection is no module's that is implemented", facts)
    works = "the module of this target's own checkpoint, or one trained for it"
    vocab_size = layer_config.get("vocab_size", target.vocab_size)
    require_target(target, works, hidden_size=projection[0], vocab_size=vocab_size)


def _no_module(checkpoint: Checkpoint) -> Refusal:
    files = checkpoint.weight_files
    where = f"{files[0].name}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    looked = ", ".join((each.prefix + each.parts["projection"]).replace("{index}", "*") for each in LAYOUTS)
    reason = (
        f"{str(checkpoint.directory)!r} has no multi-token-prediction weights: "
        f"looked for {looked} in {where} ({len(checkpoint.shapes)} tensors)"
    )
    return Refusal(reason, 'a target checkpoint that has them, or "model": a directory that holds the module')


def _refuse_quantised(names: list[str]) -> None:
    quantised = [name for name in names if name.endswith(_QUANTISED)]
    if quantised:
        reason = f"its multi-token-prediction weights are stored quantised ({quantised[0]})"
        raise Refusal(reason, "a checkpoint whose module is stored in a floating-point dtype")


def _served() -> str:
    return "a checkpoint in one of the layouts " + ", ".join(layout.name for layout in LAYOUTS)
