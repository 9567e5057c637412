"""What a kind of device computes in a way of its own, and the one table that finds these ways.

A backend stands in a room of this package that nothing imports: it is loaded by its name in `BACKENDS`, for a device of
its kind. Where it cannot be used, PyTorch computes everything as it is written in the modules beside this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .attention import attend_in_torch, attend_pages
from .philox import draft_uniforms
from .trees import move_paths, tree_masks

logger = logging.getLogger("specdec")

Form = Callable[..., Any]

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("specdec.core.kernels.cpu.backend:CpuBackend",),
    "cuda": ("specdec.core.kernels.cuda.triton_backend:TritonBackend", "specdec.core.kernels.cuda.backend:CudaBackend"),
}
"""By type of device: subclasses of `Backend`. The first that can be used serves."""

COMPILER = "specdec.core.kernels.compiled"
"""The module that compiles functions and passes. There is no plain form: what is not compiled runs as it is."""


class Backend:
    """PyTorch as it is, on any device. What a subclass leaves as it is here has no form of its own there."""

    attend: Callable[..., Tensor] = staticmethod(attend_in_torch)  # over spans that the host knows
    is_batch_invariant = False  # whether a row's bits do not depend on the rows beside it

    # Operations on tensors of the device. Their plain forms say what they compute.
    attend_pages: ClassVar[Callable[..., Tensor]] = staticmethod(attend_pages)
    tree_masks: ClassVar[Form] = staticmethod(tree_masks)
    move_paths: ClassVar[Form] = staticmethod(move_paths)
    draft_uniforms: ClassVar[Callable[..., Tensor]] = staticmethod(draft_uniforms)

    # Verification, as `rejection.sampler.verify_plainly` does it where it is None.
    verify: ClassVar[Form | None] = None
    plan_verification: ClassVar[Form | None] = None  # makes the memory of all calls; None: a call takes its own
    warm_up_verification: ClassVar[Form | None] = None

    # What an engine does its own way.
    addressing: ClassVar[Form | None] = None  # by block tables on the device; None: by the host's lists
    passes: ClassVar[Any] = None  # a class that warms passes up and captures them; None: they run as they are

    @classmethod
    def require(cls) -> None:
        """Raise Unavailable where what it computes with does not work on this machine."""

    @classmethod
    def load(cls, choice: str) -> Backend:
        """Make the backend of this machine. choice: as `EngineConfig.cpu_kernels`."""
        return cls()

    def serves_heads(self, dtype: torch.dtype, *sizes: int) -> bool:
        """Whether attention with heads of such sizes is batch-invariant."""
        return False

    def serves(self, module: nn.Module) -> bool:
        """Whether a module is of a form of this backend's that is batch-invariant."""
        return False

    def recurrences(self) -> Mapping[str, Callable[..., tuple[Tensor, Tensor]]]:
        """Operators that carry a state over few tokens, by name: as modelling code calls them."""
        return {}

    def fuse(self, network: nn.Module) -> None:
        """Join linear layers that read the same input, in place."""

    def narrow(self, network: nn.Module, keep: nn.Module | None) -> bool:
        """Store the weights of every linear layer but `keep` in int8, in place; or return False."""
        return False

    def lay_out(self, network: nn.Module, *, room: int | None, drop: bool) -> None:
        """Replace linear layers and norms in place by forms that are faster for a few rows at a time.

        room: the most bytes that second copies of weights may take. None means as many as there are. drop: whether
        first copies that nothing needs leave the network.
        """


class Unavailable(Exception):
    """A backend cannot be used on this machine; the text says why."""


def find_backend(name: str) -> type[Backend]:
    """A class of `BACKENDS`, imported now: an engine needs one of them at most.

    Raises ImportError, as for triton, which has wheels for Linux only; Unavailable.
    """
    found: type[Backend] = resolve_name(name)
    found.require()
    return found


@cache
def backend_of(kind: str) -> type[Backend]:
    """The class that serves a type of device."""
    for name in BACKENDS.get(kind, ()):
        try:
            return find_backend(name)
        except (ImportError, Unavailable) as error:
            logger.warning("%s cannot be used (%s): a plainer form serves", name, error)
    return Backend


@cache
def compiler() -> Any:
    """The module `COMPILER`. None, with a warning, where it cannot be imported."""
    try:
        return resolve_name(COMPILER)
    except ImportError as error:
        logger.warning("%s cannot be imported (%s): nothing is compiled", COMPILER, error)
        return None


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a product with its weights, as they are stored, is all that a layer computes: some quantise their input,
    and say so in a `forward` of their own; some weights are subclasses of tensors that keep quantised values."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    return isinstance(layer.weight, nn.Parameter) and not is_traceable_wrapper_subclass(layer.weight)
