"""Imported once by the server that ranks are forked from: what each would else do for itself."""

from __future__ import annotations

import contextlib
import gc
import importlib

from dflash_ext.transformers_api import warm_up

# Everything that takes long to import; not train.py, which each rank runs as its main module.
_OURS = ("worker", "receiver", "sender", "uses", "rates", "comparison", "identity")
_MODULES = [f"dflash_ext.{name}" for name in _OURS] + ["numpy.ma", "rich._emoji_codes"]

for _name in _MODULES:
    with contextlib.suppress(ImportError):  # others' names may change
        importlib.import_module(_name)

warm_up()
gc.freeze()  # all of this stays: no rank's collector need look at it, or copy its pages
