"""Keeps our modules out of FX tracing that another thread of the process does.

`torch.fx` tracing replaces `nn.Module.__call__` for the whole process while it runs, so that any
module called meanwhile, in any thread, is taken for part of the traced model and fails
(requirement 26). A class with a `__call__` of its own is not affected by the replacement.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dflash_ext.transformers_api import PLAIN_CALLS

# Bases whose __call__ adds nothing in inference or in our training: replacing it loses nothing.
_PLAIN_CALLS = ("torch.nn.modules.module.Module", *PLAIN_CALLS)

_shielded: dict[Any, type[nn.Module]] = {}
"""A class -> its subclass of the same name with a `__call__` of its own."""


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._call_impl(*args, **kwargs)  # what nn.Module.__call__ is when nobody traces


def shield(model: nn.Module) -> None:
    """Give every module of `model` a `__call__` of its own, in place; hooks work as before.

    Each module becomes an instance of a subclass of its class, of the same name. Modules of a
    class that defines its own `__call__` are left alone.
    """
    for module in model.modules():
        kind = type(module)
        caller = next(base for base in kind.__mro__ if "__call__" in vars(base))
        if f"{caller.__module__}.{caller.__qualname__}" in _PLAIN_CALLS:
            if kind not in _shielded:
                own = {"__call__": _call, "__module__": kind.__module__}
                _shielded[kind] = type(kind.__name__, (kind,), own)
            module.__class__ = _shielded[kind]
