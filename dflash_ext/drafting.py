"""The drafter at inference: keys and values of the context kept, a block of guesses per forward.

Shapes: R sequences, P context rows, B slots, K taps, Ht target hidden, H hidden, Hkv heads, D head
dim, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_ext.drafter import Drafter
from dflash_ext.reader import upload


class Drafting:
    """A drafter and its cache of R sequences: sequence r owns rows [r*capacity, (r+1)*capacity)."""

    def __init__(
        self,
        drafter: Drafter,
        rows: int,
        capacity: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """capacity: context rows of one sequence, at most."""
        config = drafter.config
        self.drafter, self.capacity, self.lengths = drafter, capacity, [0] * rows
        shape = (rows, capacity, config.num_kv_heads, config.head_dim)
        # Zeros: rows not yet written lie inside the context that the operator is given.
        self._keys, self._values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in drafter.layers]
            for _ in range(2)
        )

    def reset(self, row: int) -> None:
        """A new sequence begins in `row`."""
        self.lengths[row] = 0

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences only."""
        self.lengths = [self.lengths[r] for r in rows]
        for kept in (self._keys, self._values):
            kept[:] = [x[list(rows)] for x in kept]

    @torch.no_grad()
    def extend(self, features: Tensor, rows: Tensor, places: Tensor, counts: Sequence[int]) -> None:
        """Append context rows from features [P, K*Ht].

        rows, places: int64 [P], sequence and position of each, on the features' device; counts: how
        many of each sequence, in order after those it has. ValueError if one outgrows its room.
        """
        lengths = [length + count for length, count in zip(self.lengths, counts)]
        if max(lengths) > self.capacity:
            raise ValueError(f"drafter cache of {self.capacity} rows cannot hold {max(lengths)}")
        context = self.drafter.encode_context(features)
        made = self.drafter.context_keys_values(context, places)
        for (key, value), keys, values in zip(made, self._keys, self._values):
            keys[rows, places], values[rows, places] = key, value
        self.lengths = lengths

    @torch.no_grad()
    def draft(self, embeds: Tensor) -> Tensor:
        """Hidden rows [R*B, H] of a block after each sequence's context.

        embeds [R+1, H]: of the known tokens, and of the mask token.
        """
        R, device = len(self.lengths), embeds.device
        anchors, slots = upload(self.lengths, device), self.drafter.config.block_size
        starts = torch.arange(R, device=device) * self.capacity
        layouts = self.drafter.layouts(starts, starts + anchors, R * self.capacity)
        positions = (anchors[:, None] + torch.arange(slots, device=device)).flatten()
        contexts = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self._keys, self._values)]
        return self.drafter.blocks(embeds, contexts, positions, layouts)
