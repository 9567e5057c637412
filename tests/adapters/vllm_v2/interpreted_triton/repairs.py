"""What interpreted kernels and vLLM's platform of CPUs lack for the V2 runner. A `vllm.general_plugins` entry point."""

from __future__ import annotations


def install():
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(1.0 + x)  # in the interpreter libdevice's functions return None
    _take_any_mask()
    _keep_asynchronous_scheduling()


def _take_any_mask():
    """A mask of bool & int is a number in the interpreter, and its memory takes bool alone."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask):
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, as_bool(mask), *rest)
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(
        self, ptrs, value, as_bool(mask), *rest
    )


def _keep_asynchronous_scheduling():
    """A CPU has no streams, but the logic runs there as well: the platform switches it off after it was granted."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def wrapped(cls, vllm_config):
        granted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = granted

    CpuPlatform.check_and_update_config = classmethod(wrapped)
