"""Requests with unusable options are refused where they come in: over HTTP with status 400, and the text says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

from specdec.core.host import registry
from specdec.sdk.errors import RequestError

from ..request_options import read_request
from ..vllm import is_ours, method_of
from .prepare import Prepared


@cache
def install() -> None:
    """Check requests as they arrive. Called once in every process that may take requests."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    InputProcessor.process_inputs = _checked(InputProcessor.process_inputs, VLLMValidationError)


def _checked(original: Callable[..., Any], refusal: type[Exception]) -> Callable[..., Any]:
    """refusal: what vLLM answers with status 400."""
    known: WeakKeyDictionary[Any, registry.LoadedProposer] = WeakKeyDictionary()  # by InputProcessor

    @wraps(original)
    def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = processor.vllm_config
        extra_args = getattr(params, "extra_args", None)  # parameters of pooling have none
        if extra_args and is_ours(config.speculative_config):
            if processor not in known:
                method = method_of(config.speculative_config.model)
                known[processor] = Prepared.of(method, config, in_worker=False).speculation.loaded
            try:
                read_request(known[processor], extra_args, request_id)
            except RequestError as error:
                raise refusal(str(error)) from error
        return original(processor, request_id, prompt, params, *args, **kwargs)

    return process_inputs
