"""The target's side of decoding: key-value caches of many sequences, read and taken back.

A step reads a known token and a tree of guesses after it, for every sequence at once; what is kept
afterwards is one path of each tree. Shapes: R sequences (rows), n nodes, V vocabulary, K*Ht
features, P kept nodes of all rows together.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_ext.errors import UserError
from dflash_ext.placement import to_device
from dflash_ext.target import Target
from dflash_ext.transformers_api import attention_implementation, keys_and_values
from dflash_ext.tree import ancestors, depths, is_chain

log = logging.getLogger(__name__)

# Layers whose whole state is keys and values, one column per token.
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}
# transformers hands a prepared mask to the attention only in these.
MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Kept:
    """Nodes that became part of their sequences, row by row; int64 [P] on the target's device."""

    rows: Tensor
    nodes: Tensor
    places: Tensor
    """Positions in their sequences."""
    counts: list[int]
    """Nodes of each row."""


class Reader(Protocol):
    """R sequences and what the target remembers of them."""

    lengths: list[int]
    """Tokens that each sequence keeps."""

    def start(self, row: int, prompt: Sequence[int], *, taps: bool) -> tuple[Tensor, Tensor | None]:
        """Make `row` a new sequence: logits [1, V] after the prompt [t], features [t, K*Ht]."""

    def read(
        self, ids: Tensor, parents: Sequence[Sequence[int]], *, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, n, V] and features [R*n, K*Ht] at the nodes ids [R, n] of one tree per row.

        Node 0 is a row's next token; parents: of the other nodes, n - 1 for each row.
        """

    def keep(self, paths: Sequence[Sequence[int]]) -> Kept:
        """Keep a path from node 0 on of each row's tree and forget the rest."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""


def takes_trees(target: Target) -> bool:
    """Can the target verify trees, or chains only?"""
    return target.layer_types <= ATTENTION_LAYER_TYPES


def require_trees(target: Target) -> None:
    """UserError unless `takes_trees`."""
    if not takes_trees(target):
        raise UserError(
            f"target {target.path!r} has {sorted(target.layer_types)} layers, whose state follows "
            "one text only: it can verify chains, not trees"
        )


def open_reader(target: Target, rows: int, capacity: int) -> Reader:
    """The reader that fits a target. capacity: columns, a longest sequence and a largest tree."""
    if len(target.devices) > 1:
        raise UserError(
            f"target {target.path!r} is spread over {len(target.devices)} devices, where it gives "
            "features only: load it on one to decode with it"
        )
    if takes_trees(target):
        return AttentionReader(target, rows, capacity)
    return StateReader(target, rows)


def upload(values: Any, device: torch.device | str) -> Tensor:
    """A host array on the device."""
    return to_device(torch.as_tensor(np.asarray(values)), device)


def _kept(paths: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device) -> Kept:
    places = [
        (r, node, lengths[r] + i) for r, path in enumerate(paths) for i, node in enumerate(path)
    ]
    rows, nodes, columns = upload(np.array(places, dtype=np.int64).T.copy(), device)
    return Kept(rows, nodes, columns, [len(path) for path in paths])


def _start(
    target: Target, cache: Any, prompt: Sequence[int], taps: bool
) -> tuple[Tensor, Tensor | None]:
    ids = upload(np.array([prompt], dtype=np.int64), target.device)
    positions = torch.arange(len(prompt), device=target.device)[None]
    logits, features = target.forward_with_taps(ids, positions, cache, last_only=True, taps=taps)
    if cache.get_seq_length() != len(prompt):
        raise UserError(
            f"target {type(target.model).__name__} does not keep its state in a key-value cache: "
            "decoding with it is not supported"
        )
    return logits[:, -1], features


def _columns_class() -> type[Any]:
    from transformers import DynamicLayer  # heavy: not where only options are parsed

    class Columns(DynamicLayer):
        """Keys and values of one decoder layer, [R, Hkv, capacity, D] allocated once.

        Sequence r owns columns 0 .. its length; what a step reads stands from `width` (the longest
        length) on until it is kept or overwritten. All columns stay, also those a sliding window
        has passed: a rolling buffer would have thrown away what taking back needs.
        """

        def __init__(self, rows: int, capacity: int) -> None:
            super().__init__()
            self.rows, self.capacity, self.width = rows, capacity, 0
            self.buffers: list[Tensor] = []

        def fill(self, row: int, keys: Tensor, values: Tensor) -> None:
            """Give `row` the columns [1, Hkv, t, D] of its prompt."""
            if not self.buffers:
                self.dtype, self.device = keys.dtype, keys.device
                # Zeros: a masked column must still be finite, 0 * NaN is not 0.
                self.buffers = [
                    x.new_zeros(self.rows, x.shape[1], self.capacity, x.shape[3])
                    for x in (keys, values)
                ]
                self.is_initialized = True
            for buffer, new in zip(self.buffers, (keys, values)):
                buffer[row, :, : new.shape[2]] = new[0]

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            end = self.width + key_states.shape[-2]
            for buffer, new in zip(self.buffers, (key_states, value_states)):
                buffer[:, :, self.width : end] = new
            self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
            return self.keys, self.values

        def get_seq_length(self, *args: Any) -> int:
            return self.width

        def move(self, rows: Tensor, sources: Tensor, places: Tensor) -> None:
            for buffer in self.buffers:
                buffer[rows, :, places] = buffer[rows, :, sources]

        def select(self, rows: Tensor) -> None:
            self.rows = rows.numel()
            self.buffers = [buffer[rows] for buffer in self.buffers]

    return Columns


class AttentionReader:
    """For targets of full and sliding attention: all sequences in one forward, trees too."""

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        from transformers import Cache

        self.target, self.lengths = target, [0] * rows
        columns = _columns_class()
        self._layers = [columns(rows, capacity) for _ in range(target.num_layers)]
        self._cache = Cache(layers=list(self._layers))

    def start(self, row: int, prompt: Sequence[int], *, taps: bool) -> tuple[Tensor, Tensor | None]:
        from transformers import DynamicCache

        # Without the model's config sliding layers keep all columns; the mask does the rest.
        alone = DynamicCache()
        logits, features = _start(self.target, alone, prompt, taps)
        for layer, read in zip(self._layers, alone.layers):
            if (columns := keys_and_values(read)) is not None:
                layer.fill(row, *columns)
        self._set_length({row: len(prompt)})
        return logits, features

    def _set_length(self, lengths: dict[int, int]) -> None:
        for row, length in lengths.items():
            self.lengths[row] = length
        for layer in self._layers:
            layer.width = max(self.lengths)

    def read(
        self, ids: Tensor, parents: Sequence[Sequence[int]], *, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        levels = np.array([depths(p) for p in parents])
        positions = levels + np.array(self.lengths)[:, None]
        mask = self._mask(parents, positions)
        return self.target.forward_with_taps(
            ids, upload(positions, self.target.device), self._cache, mask=mask, taps=taps
        )

    def _mask(self, parents: Sequence[Sequence[int]], positions: np.ndarray) -> Any:
        """What every node sees, as transformers takes it: its sequence and the nodes above it."""
        width, device = max(self.lengths), self.target.device
        if all(n == width for n in self.lengths) and all(map(is_chain, parents)):
            return None  # plain causality, for which there are faster kernels
        kind = attention_implementation(self.target.model.config.get_text_config())
        if kind not in MASKED_ATTENTION:
            raise UserError(
                f"target {self.target.path!r} uses {kind} attention, which takes no mask: trees "
                f"and batches need attn_implementation {' or '.join(MASKED_ATTENTION)}"
            )
        lengths = upload(np.array(self.lengths), device)[:, None, None]
        at = upload(positions, device)[:, :, None]
        columns = torch.arange(width, device=device)
        past = (columns < lengths).expand(-1, at.shape[1], -1)
        own = upload(np.stack([ancestors(p) for p in parents]), device)
        masks = {"full_attention": torch.cat([past, own], -1)}
        if self.target.window is not None:
            places = torch.cat([columns.expand(len(parents), 1, -1), at.mT], -1)
            near = at - places < self.target.window
            masks["sliding_attention"] = masks["full_attention"] & near
        # Added to the scores: the form that every implementation of attention takes.
        lowest = torch.finfo(self.target.dtype).min
        added = {
            name: torch.zeros(seen.shape, dtype=self.target.dtype, device=device)
            .masked_fill_(~seen, lowest)
            .unsqueeze(1)
            for name, seen in masks.items()
            if name in self.target.layer_types
        }
        return added if len(added) > 1 else next(iter(added.values()))

    def keep(self, paths: Sequence[Sequence[int]]) -> Kept:
        kept = _kept(paths, self.lengths, self.target.device)
        width = max(self.lengths)
        in_place = all(
            length == width and list(path) == list(range(len(path)))
            for length, path in zip(self.lengths, paths)
        )
        if not in_place:
            for layer in self._layers:
                layer.move(kept.rows, kept.nodes + width, kept.places)
        self._set_length({r: self.lengths[r] + len(path) for r, path in enumerate(paths)})
        return kept

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[r] for r in rows]
        index = upload(np.array(rows, dtype=np.int64), self.target.device)
        for layer in self._layers:
            layer.select(index)
        self._set_length({})


class StateReader:
    """For targets with a state that tokens cannot be taken out of: chains, row after row.

    The state is copied before a chain is read; if not all of it is kept, the copy reads again what
    is.
    """

    def __init__(self, target: Target, rows: int) -> None:
        self.target, self.lengths = target, [0] * rows
        self._caches: list[Any] = [None] * rows
        self._before: list[Any] = [None] * rows
        self._ids = torch.zeros(rows, 0, dtype=torch.int64)
        self._together = True
        self._together = self._continues()

    def start(self, row: int, prompt: Sequence[int], *, taps: bool) -> tuple[Tensor, Tensor | None]:
        from transformers import DynamicCache

        self._caches[row] = DynamicCache(config=self.target.model.config)
        self.lengths[row] = len(prompt)
        return _start(self.target, self._caches[row], prompt, taps)

    def _extend(
        self, row: int, ids: Tensor, *, taps: bool = False, last_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        begin, cache = self.lengths[row], self._caches[row]
        positions = torch.arange(begin, begin + ids.numel(), device=ids.device)
        size = ids.numel() if self._together else 1
        said = [
            self.target.forward_with_taps(
                piece[None], places[None], cache, last_only=last_only, taps=taps
            )
            for piece, places in zip(ids.split(size), positions.split(size))
        ]
        logits, features = zip(*said)
        return (
            logits[-1] if last_only else torch.cat(logits, 1),
            torch.cat(features) if taps else None,
        )

    def read(
        self, ids: Tensor, parents: Sequence[Sequence[int]], *, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert all(map(is_chain, parents))
        if ids.shape[1] > 1:
            self._before = [copy.deepcopy(cache) for cache in self._caches]
        self._ids = ids
        logits, features = zip(*[self._extend(r, row, taps=taps) for r, row in enumerate(ids)])
        return torch.cat(logits), torch.cat(features) if taps else None

    def keep(self, paths: Sequence[Sequence[int]]) -> Kept:
        kept = _kept(paths, self.lengths, self.target.device)
        for row, path in enumerate(paths):
            if len(path) < self._ids.shape[1]:
                self._caches[row] = self._before[row]
                self._extend(row, self._ids[row, : len(path)], last_only=True)
            self.lengths[row] += len(path)
        return kept

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[r] for r in rows]
        self._caches = [self._caches[r] for r in rows]

    def _continues(self) -> bool:
        """Do several tokens read at once continue the state as one by one do?

        UserError if even those do not.
        """
        ids = torch.arange(1, 8, device=self.target.device) % self.target.vocab_size
        whole, singly, together = (
            self._last_logits(ids.split(sizes)) for sizes in ([7], [3, 1, 1, 1, 1], [3, 4])
        )
        kinds = sorted(self.target.layer_types - ATTENTION_LAYER_TYPES)
        if not self._agree(singly, whole):
            raise UserError(
                f"target {self.target.path!r}: this transformers does not continue the state of "
                f"its {kinds} layers token by token: decoding with it is not supported"
            )
        if self._agree(together, whole):
            return True
        log.warning(
            "this transformers forgets the state of %s layers when it reads several tokens at "
            "once: they are read one by one, which gives the same text and saves no time; a newer "
            "one reads them together",
            kinds,
        )
        return False

    def _last_logits(self, pieces: Sequence[Tensor]) -> Tensor:
        first, *rest = pieces
        logits, _ = self.start(0, first.tolist(), taps=False)
        for piece in rest:
            logits = self._extend(0, piece)[0][:, -1]
            self.lengths[0] += piece.numel()
        self.lengths[0], self._caches[0] = 0, None
        return logits[0].float()

    def _agree(self, one: Tensor, other: Tensor) -> bool:
        tolerance = 1e-3 if self.target.dtype == torch.float32 else 5e-2
        return float((one - other).norm() / other.norm()) < tolerance  # also False for NaN
