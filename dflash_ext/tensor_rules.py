"""What the tensors of a stored drafter must be, given what its config.json says."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_ext.drafter import Drafter
from dflash_ext.layout_reader import Reading
from dflash_ext.stored import WEIGHTS, StoredTensors

OWN_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's embedding and head, which the speculators layout may hold."""
ALSO_IN_SPECULATORS = {*OWN_VOCABULARY, "verifier_lm_head.weight", "verifier_norm.weight"}
VOCABULARY_MAPS = {"d2t", "t2d"}
FLOATS = {"BF16", "F32", "F16", "F64"}


def tensor_problems(reading: Reading, tensors: StoredTensors) -> list[str]:
    """One line for each tensor that is missing, unknown, of another shape or no float."""
    names, wrong = tensors.names, list[str]()
    if "fc.weight" in names:
        wrong += _taps(reading, tensors.shape("fc.weight"))
    if not reading.problems:  # else the shapes are not known
        wrong += _names_and_shapes(reading, tensors, skip={"fc.weight"} if wrong else set())
    elif "fc.weight" not in names:
        wrong.append("tensor fc.weight is missing")
    odd = [n for n in sorted(names - VOCABULARY_MAPS) if tensors.dtype(n) not in FLOATS]
    wrong += [f"tensor {name} is {tensors.dtype(name)}, expected BF16" for name in odd]
    return [f"{WEIGHTS}: {line}" for line in wrong]


def _taps(reading: Reading, shape: tuple[int, ...]) -> Iterator[str]:
    """fc.weight [H, K*Ht] tells how wide the features were."""
    taps, width = (reading.values.get(k) for k in ("target_layer_ids", "target_hidden_size"))
    if taps is None or width is None:
        return
    columns = shape[-1] if shape else 1
    if columns != len(taps) * width:
        got = f"{columns // width}" if width and columns % width == 0 else f"{columns} columns"
        yield f"fc.weight expected {len(taps)} taps × {width}, got {got}"


def _names_and_shapes(reading: Reading, tensors: StoredTensors, skip: set[str]) -> Iterator[str]:
    with torch.device("meta"):
        expected = {n: tuple(p.shape) for n, p in Drafter(reading.config()).named_parameters()}
    vocabulary = (reading.values["vocab_size"], reading.values["hidden_size"])
    if reading.layout == "speculators":
        yield from _vocabulary_maps(tensors)
        present = tensors.names
        expected |= {name: vocabulary for name in OWN_VOCABULARY if name in present}
        unknown = present - expected.keys() - ALSO_IN_SPECULATORS - VOCABULARY_MAPS
    else:
        unknown = tensors.names - expected.keys()
    yield from (f"tensor {name} is missing" for name in sorted(expected.keys() - tensors.names))
    yield from (f"tensor {name} is unknown" for name in sorted(unknown))
    for name in sorted(expected.keys() & tensors.names - skip):
        if (got := tensors.shape(name)) != expected[name]:
            yield f"{name} expected {expected[name]}, got {got}"


def _vocabulary_maps(tensors: StoredTensors) -> Iterator[str]:
    """Maps between draft and target vocabulary are allowed if they change nothing."""
    if "d2t" in tensors.names and bool(tensors.get("d2t").any()):
        yield "d2t maps to other tokens: a reduced vocabulary is not supported"
    if "t2d" in tensors.names and not bool(tensors.get("t2d").all()):
        yield "t2d leaves tokens out: a reduced vocabulary is not supported"


def tensor_flaws(tensors: StoredTensors) -> list[str]:
    """One line for each tensor in a precision that engines would not expect."""
    odd = [n for n in sorted(tensors.names) if tensors.dtype(n) in FLOATS - {"BF16"}]
    return [f"{WEIGHTS}: {name} is {tensors.dtype(name)}, expected BF16" for name in odd]


def non_finite(tensors: StoredTensors) -> list[str]:
    """One line for each tensor with a NaN or an infinity; reads all of them, one at a time."""
    return [
        f"{WEIGHTS}: {name} is not finite"
        for name in sorted(tensors.names)
        if tensors.dtype(name) in FLOATS and not bool(tensors.get(name).isfinite().all())
    ]
