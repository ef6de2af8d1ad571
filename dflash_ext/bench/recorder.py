"""Which functions of the extension an operator calls, and with what: seen, not predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from dflash_ext.bench.timing import Run


class Recorder:
    """Stands for `dflash_ext._C` and remembers the calls that pass through it."""

    def __init__(self, module: ModuleType, calls: list[tuple[str, Run]]) -> None:
        self._module = module
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, partial(found, *args, **kwargs)))
            return found(*args, **kwargs)

        return call


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[tuple[str, Run]]]:
    """The extension calls that `module` (one of dflash_ext.ops) makes inside the block.

    They can be repeated as they are while the tensors they point to live, whichever kernels the
    operator chose.
    """
    calls: list[tuple[str, Run]] = []
    real = module._C
    module._C = Recorder(real, calls)  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        module._C = real  # type: ignore[attr-defined]
