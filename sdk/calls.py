"""How a name of the SDK is called, for errors about a call that was not."""

from __future__ import annotations

import inspect
import re
import sys

_COMPLAINT = re.compile(r"(\w+)\.(\w+)\(\) (?:missing|takes|got)")  # as Python puts it


def right_call(error: BaseException) -> str | None:
    """The call that was meant where a class of the SDK was called with other arguments. None: the error is another."""
    complaint = _COMPLAINT.match(str(error)) if type(error) is TypeError else None
    sdk = sys.modules[__package__]
    if complaint is None or complaint[1] not in sdk.__all__:
        return None
    name, method = complaint.groups()
    cls = getattr(sdk, name)
    called = cls if method == "__init__" else vars(cls)[method].__get__(None, cls)
    shown = (
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in inspect.signature(called).parameters.values()
    )
    return f"{name}{'' if method == '__init__' else f'.{method}'}({', '.join(shown)})"
