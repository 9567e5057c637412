"""Hidden states of chosen layers, kept as a transformers model computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from specdec.sdk.errors import UnsupportedModelError

HiddenState = int | Literal["final"]


class HiddenStates:
    """What the last forward pass computed at boundaries 0 .. num_layers, or 'final'; until `remove`."""

    def __init__(self, model: Any, wanted: Sequence[HiddenState], num_layers: int) -> None:
        """Raises UnsupportedModelError SD-E145 if the states between layers are wanted and the layers not found."""
        self.wanted = tuple(wanted)
        self._model_type: str = model.config.model_type
        self.kept: dict[HiddenState, Tensor] = {}  # by the pass that is running
        decoder = model.get_decoder()
        boundaries = any(each != "final" for each in self.wanted)
        layers = decoder_layers(decoder, num_layers, model.config) if boundaries else nn.ModuleList()
        self._handles = [self._hook(decoder, layers, each) for each in dict.fromkeys(self.wanted)]

    def take(self) -> tuple[Tensor, ...]:
        """Take the states of the last pass over N tokens, in the order that was asked for: L of [N, H].

        Raises UnsupportedModelError SD-E145 if the layers hand on several states of a token.
        """
        if any(kept.dim() != 3 for kept in self.kept.values()):  # [1, N, H], or [B, n, H]
            raise _not_found(self._model_type, "its layers hand on several states of each token")
        hidden = tuple([self.kept[each].flatten(0, 1) for each in self.wanted])
        self.kept.clear()
        return hidden

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, decoder: nn.Module, layers: nn.ModuleList, wanted: HiddenState) -> Any:
        if wanted == "final":
            return decoder.register_forward_hook(partial(self._keep_output, wanted))
        if wanted == len(layers):
            return layers[-1].register_forward_hook(partial(self._keep_output, wanted))
        return layers[wanted].register_forward_pre_hook(partial(self._keep_input, wanted), with_kwargs=True)

    def _keep_input(
        self, wanted: HiddenState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.kept[wanted] = args[0] if args else kwargs["hidden_states"]

    def _keep_output(self, wanted: HiddenState, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.kept[wanted] = output if isinstance(output, Tensor) else output[0]


def passed_through(modules: Iterable[nn.Module], run: Callable[[], object]) -> dict[nn.Module, tuple[Any, Any]]:
    """The arguments of each of these modules that a pass calls, and what it returned."""
    seen: dict[nn.Module, tuple[Any, Any]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[module] = args, output

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(keep))
        run()
    return seen


def decoder_layers(decoder: nn.Module, num_layers: int, config: Any) -> nn.ModuleList:
    """A decoder's list of layers. Raises UnsupportedModelError SD-E145 if it has none of this length."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise _not_found(config.model_type, f"its decoder has no list of {num_layers} layers")


def _not_found(model_type: str, because: str) -> UnsupportedModelError:
    facts = {"model_type": model_type, "because": because}
    return UnsupportedModelError(
        "SD-E145", "the layers of this model cannot be found, so hidden states between them cannot be shown", facts
    )
