"""Decoding many rows of one length in lockstep: the cache they share and how a token is drawn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer

from dflash_ext.transformers_api import cache_argument, can_repeat_rows, last_logits_only

# Rows are looked at, and finished ones dropped, once in so many steps: one host sync each.
CHECK_EVERY = 8
# Copying the cache to drop rows pays once this share of them is finished.
DROP_SHARE = 0.1
# Probability that no candidate of a draw lies in the nucleus; the most probable token is it then.
_MISS = 1e-5


def sample_top_p(logits: Tensor, generator: torch.Generator, top_p: float) -> Tensor:
    """Token int64 [R] drawn at temperature 1 from the `top_p` nucleus of `logits` [R, V].

    Without a sort: candidates are drawn from the whole distribution in an exponential race, and
    the first to cross the line that lies in the nucleus is a draw from the nucleus.
    """
    probs = logits.float().softmax(-1)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    draws = 1 if top_p >= 1 else math.ceil(math.log(_MISS) / math.log1p(-top_p))
    # In the order of their arrival.
    drawn = (probs / noise).topk(min(draws, probs.shape[-1]), dim=-1).indices
    drawn_probs = probs.gather(-1, drawn)
    choice = logits.argmax(-1)
    for draw in reversed(range(drawn.shape[-1])):
        # In the nucleus: the tokens more probable than this one do not fill it already.
        above = torch.where(probs > drawn_probs[:, draw, None], probs, 0.0).sum(-1)
        choice = torch.where(above < top_p, drawn[:, draw], choice)
    return choice


class _Buffered(DynamicLayer):
    """A model layer's cache that writes into one allocation instead of growing by copies."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self._buffers = [self._allocate(x, capacity) for x in (keys, values)]
        self._length = keys.shape[-2]
        self.is_initialized = True
        self._show()

    @staticmethod
    def _allocate(x: Tensor, capacity: int) -> Tensor:
        buffer = x.new_empty(*x.shape[:2], capacity, x.shape[-1])
        buffer[:, :, : x.shape[-2]] = x
        return buffer

    def _show(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, self._length = self._length, self._length + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states)):
            buffer[:, :, start : self._length] = new
        return self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show()


def forward(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Logits [R, V] of the last position; `cache` grows by `ids` [R, n]."""
    arguments: dict[str, Any] = {"use_cache": True, cache_argument(model): cache}
    if ids.shape[1] > 1:  # not a [R, n, V] of which all but a row is dropped
        arguments |= last_logits_only(model)
    logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits[:, -1]


def start_cache(model: Any, ids: Tensor, rows: int, capacity: int) -> tuple[Tensor, Any]:
    """Logits [rows, V] after `ids`, and the cache holding them, with room for `capacity` tokens.

    ids: int64 [rows, n], or [1, n] for a prefix of all rows, computed once.
    """
    cache = DynamicCache(config=model.config)
    logits = forward(model, ids, cache)
    if ids.shape[0] != rows:
        if can_repeat_rows(cache):
            cache.batch_repeat_interleave(rows)
            logits = logits.expand(rows, -1)
        else:
            cache = DynamicCache(config=model.config)
            logits = forward(model, ids.expand(rows, -1), cache)
    # Exactly DynamicLayer: its subclasses (sliding windows) keep less than everything.
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            assert layer.keys is not None
            assert layer.values is not None
            cache.layers[i] = _Buffered(layer.keys, layer.values, capacity)
    return logits, cache


def up_to_stop(answer: list[int], stops: list[int]) -> list[int]:
    """Through the first stop token: a row runs on, past its end, until it is looked at."""
    stop = next((i for i, token in enumerate(answer) if token in stops), len(answer))
    return answer[: stop + 1]
