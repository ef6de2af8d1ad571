"""Imported once by the server that ranks are forked from: what each would else do for itself."""

from __future__ import annotations

import contextlib
import gc
import importlib

# Everything that takes long to import; not train.py, which each rank runs as its main module.
_OURS = ("worker", "receiver", "sender", "uses", "rates", "comparison", "identity")
_MODULES = [f"dflash_ext.{name}" for name in _OURS] + ["numpy.ma", "rich._emoji_codes"]
_MODULES += [f"transformers.models.auto.{name}_auto" for name in ("modeling", "tokenization")]
_MODULES += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")]

for _name in _MODULES:
    with contextlib.suppress(ImportError):  # others' names may change
        importlib.import_module(_name)

# A table of a thousand regular expressions that transformers builds when it first loads a model;
# without it a rank is merely slower.
with contextlib.suppress(Exception):
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")

gc.freeze()  # all of this stays: no rank's collector need look at it, or copy its pages
