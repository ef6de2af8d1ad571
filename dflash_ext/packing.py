"""Documents laid end to end in one forward of a transformers model, without padding.

Attention is what keeps documents apart, so that is where packing enters: under a name of ours in
transformers' attention interface. While a thread has a `Packing` open, attention of the model's
layers sees documents and no mask is built; any other forward of the same model, in the same or
another thread, runs as it did before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext import transformers_api
from dflash_ext.ops.causal import causal_attention, causal_layout
from dflash_ext.ops.layout import AttentionLayout
from dflash_ext.ops.rotary import RopeTables

# The attention a model had -> ours over it. transformers reads meaning into names that have "flash"
# or "sdpa" in them, hence these.
INTERFACE_NAMES = {"sdpa": "packed_documents", "eager": "packed_documents_over_eager"}
_UNSUPPORTED = ("softcap", "position_bias", "head_mask")


class Packing:
    """What the layers of one packed forward share: who sees whom, and the angles."""

    def __init__(self, doc_starts: Tensor) -> None:
        """doc_starts: int64 [docs + 1] on the CPU, rising from 0 to T."""
        self._doc_starts = doc_starts
        self._layouts: dict[tuple[torch.device, int | None], AttentionLayout] = {}
        self._tables: dict[int, tuple[Tensor, RopeTables]] = {}

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[T, Hq, D] of q [T, Hq, D], k and v [T, Hkv, D]: `causal_attention` of the documents."""
        key = q.device, window
        if key not in self._layouts:
            self._layouts[key] = causal_layout(self._doc_starts, q.device, window)
        return causal_attention(q, k, v, self._layouts[key], scale=scale, sinks=sinks)

    def tables(self, angles: tuple[Tensor, Tensor], head_dim: int) -> RopeTables:
        """The model's own cos and sin as our operator takes them; once for all layers.

        angles: two of [1, T, D] with equal halves, or [1, T, D/2], in the model's dtype.
        """
        key = id(angles[0])
        if key not in self._tables:
            # Some releases make them with their axes swapped (gpt-oss, 5.6).
            cos, sin = (x[0, :, : head_dim // 2].float().contiguous() for x in angles)
            # The original is kept as well: only among the living is an id one of a kind.
            self._tables[key] = angles[0], RopeTables(cos, sin)
        return self._tables[key][1]


_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)


def current_packing() -> Packing | None:
    """That of this thread's forward, if it is a packed one."""
    return _packing.get()


@contextmanager
def packed(packing: Packing) -> Iterator[None]:
    """Within: this thread's forwards of a model that was made ready are packed."""
    token = _packing.set(packing)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_inputs(input_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Keywords of a packed forward of ids and positions, both int64 [T] on the model's device."""
    # A mask of four dimensions is passed on as it is, so none is built; attention never reads it.
    no_mask = input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)
    return {
        "input_ids": input_ids[None],
        "position_ids": positions[None],
        "attention_mask": no_mask,
        "use_cache": False,
    }


def set_packed_attention(config: Any) -> str:
    """Make a text config's model ready for packed forwards; returns the name it had, to undo it.

    The name must be one of INTERFACE_NAMES.
    """
    before = transformers_api.attention_implementation(config)
    name = INTERFACE_NAMES[before]

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Any:
        packing = current_packing()
        if packing is None:
            return transformers_api.attention(module, before)(module, q, k, v, mask, **options)
        return _attend(packing, q, k, v, options), None

    transformers_api.register_attention(name, attend, masks_of=before)
    transformers_api.set_attention(config, name)
    return before


def _attend(packing: Packing, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """transformers' [1, heads, T, D] to its [1, T, Hq, D]."""
    meant = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if meant:
        raise ValueError(f"attention with {', '.join(meant)} is not supported in a packed forward")
    out = packing.attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)),
        window=options.get("sliding_window"),
        scale=options.get("scaling"),
        sinks=options.get("s_aux"),
    )
    return out[None]
