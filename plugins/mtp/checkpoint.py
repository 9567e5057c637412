"""A multi-token-prediction module, whoever published it, as one specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.sdk import Checkpoint, CheckpointError, ProposerConfig, Refusal, TargetInfo

from .layouts import BLOCK_RECYCLING_TYPES, LAYOUTS, MtpLayout, Recycled, find_modules, unserved_layout

_QUANTISED = (".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", ".qzeros")


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """What the module is, where its tensors are, and how it was trained to be run."""

    checkpoint: Checkpoint
    layout: MtpLayout
    index: int  # of the module among the checkpoint's: the first
    num_modules: int
    decoder: Mapping[str, Any]  # the configuration of its one layer under transformers' names
    hidden_size: int
    has_bias: bool  # of the projection
    recycled: Recycled

    @classmethod
    def read(cls, config: ProposerConfig, target: TargetInfo) -> MtpSpec:
        """From config.json and the tensors' names and shapes: nothing else tells the layouts apart.

        Raises Refusal if there is no such module or its layout is not implemented; CheckpointError: SD-E105, SD-E146,
        SD-E170, SD-E171.
        """
        checkpoint = Checkpoint.open(config.model or target.checkpoint_dir or target.model)
        shapes = checkpoint.shapes
        found = find_modules(shapes)
        if found is None:
            raise _no_module(checkpoint)
        layout, numbers = found
        index = numbers[0]
        stem = (layout.prefix + layout.parts["projection"]).format(index=index)
        layer_prefix = (layout.prefix + layout.layer).format(index=index)
        names = [name for name in shapes if name.startswith(layout.prefixes(index))]
        _refuse_quantised(names)
        own = checkpoint.get("transformer_layer_config", dict, None)
        layer_config = target.config if own is None else own
        is_sparse = any(name.startswith(layer_prefix) and ".experts." in name for name in names)
        shape = shapes[stem + ".weight"]
        _check_fits(shape, layer_config, target)
        return cls(
            checkpoint=checkpoint,
            layout=layout,
            index=index,
            num_modules=len(numbers),
            decoder=one_layer(layer_config, sparse=is_sparse),
            hidden_size=shape[0],
            has_bias=f"{stem}.bias" in shapes,
            recycled=config.options.recycled_hidden or _recycled(layout, layer_config),
        )


def one_layer(config: Mapping[str, Any], *, sparse: bool) -> dict[str, Any]:
    """A decoder's configuration cut down to one layer: with full attention where it has any, and experts if `sparse`.

    Every key that assigns kinds of layers by their number is set for layer 0.
    """
    kinds = config.get("layer_types") or ["full_attention"]
    ours = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention" if "full_attention" in kinds else kinds[-1]],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_end_index": 0,
    }
    return {**config, **{key: value for key, value in ours.items() if key in config}, "num_hidden_layers": 1}


def _recycled(layout: MtpLayout, layer_config: Mapping[str, Any]) -> Recycled:
    return "block" if layer_config.get("model_type") in BLOCK_RECYCLING_TYPES else layout.recycled


def _check_fits(projection: tuple[int, ...], layer_config: Mapping[str, Any], target: TargetInfo) -> None:
    """`projection` is that tensor's shape, [H, 2H]."""
    if len(projection) != 2 or projection[1] != 2 * projection[0]:
        facts = {"expected": "a projection [H, 2H]", "found": list(projection)}
        raise CheckpointError("SD-E175", "the draft checkpoint's projection is no module's that is implemented", facts)
    pairs = {
        "hidden size": (projection[0], target.hidden_size),
        "vocabulary": (layer_config.get("vocab_size", target.vocab_size), target.vocab_size),
    }
    for fact, (expected, found) in pairs.items():
        if expected != found:
            reason = f"the module is for a target whose {fact} is {expected}, and this target's is {found}"
            raise Refusal(reason, "the module of this target's own checkpoint, or one trained for it")


def _no_module(checkpoint: Checkpoint) -> Refusal:
    unserved = unserved_layout(checkpoint.shapes)
    if unserved is not None:
        return Refusal(f"the layout {unserved} of multi-token-prediction weights is not implemented", _served())
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
