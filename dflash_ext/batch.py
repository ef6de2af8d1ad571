"""The packed batch: documents concatenated without padding, the one record that travels.

Token ids, loss mask and document boundaries are only ever sliced together, so they cannot
come apart (requirement 2). Shapes: T tokens, `docs` documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dflash_ext.errors import UserError


@dataclass(frozen=True)
class PackedBatch:
    input_ids: Tensor
    """int64 [T], on the CPU."""
    loss_mask: Tensor
    """bool [T]: True where the token was produced by the assistant and is supervised."""
    doc_starts: Tensor
    """int64 [docs + 1]: document d is rows doc_starts[d] .. doc_starts[d + 1]; last entry is T."""
    sample_ids: tuple[int, ...]
    """Index of each document in its store; names the document in every error message."""

    def __post_init__(self) -> None:
        T = self.input_ids.numel()
        if self.loss_mask.shape != (T,) or self.input_ids.shape != (T,):
            raise UserError(
                f"packed batch of samples {self.sample_ids}: {T} token ids but loss mask of shape "
                f"{tuple(self.loss_mask.shape)}; both must be [{T}]"
            )
        docs = len(self.sample_ids)
        if self.doc_starts.shape != (docs + 1,):
            raise UserError(
                f"packed batch: {docs} sample ids need {docs + 1} document starts, "
                f"got shape {tuple(self.doc_starts.shape)}"
            )
        bounds = self.doc_starts.tolist()
        if bounds[0] != 0 or bounds[-1] != T or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"packed batch: document starts {bounds} must rise from 0 to {T}")

    @classmethod
    def from_documents(
        cls, documents: Sequence[tuple[Tensor, Tensor]], sample_ids: Sequence[int]
    ) -> PackedBatch:
        """Concatenate (ids int [n], mask bool [n]) pairs. Raises UserError on a length mismatch."""
        for sample, (ids, mask) in zip(sample_ids, documents, strict=True):
            if ids.shape != mask.shape:
                raise UserError(
                    f"sample {sample}: {ids.numel()} token ids but {mask.numel()} mask values"
                )
        lengths = torch.tensor([0] + [ids.numel() for ids, _ in documents], dtype=torch.int64)
        return cls(
            input_ids=torch.cat([ids for ids, _ in documents]).to(torch.int64),
            loss_mask=torch.cat([mask for _, mask in documents]).to(torch.bool),
            doc_starts=lengths.cumsum(0),
            sample_ids=tuple(int(s) for s in sample_ids),
        )

    @classmethod
    def random(cls, lengths: Sequence[int], vocab_size: int, seed: int = 0) -> PackedBatch:
        """Documents of these lengths, every token supervised and drawn alike; the same by seed."""
        generator = torch.Generator().manual_seed(seed)
        documents = [
            (torch.randint(vocab_size, (n,), generator=generator), torch.ones(n, dtype=torch.bool))
            for n in lengths
        ]
        return cls.from_documents(documents, range(len(documents)))

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_documents(self) -> int:
        return len(self.sample_ids)

    def lengths(self) -> Tensor:
        """int64 [docs]."""
        return self.doc_starts.diff()

    def positions(self) -> Tensor:
        """int64 [T]: position of each token inside its own document (restarts at 0)."""
        starts = torch.repeat_interleave(self.doc_starts[:-1], self.lengths())
        return torch.arange(self.num_tokens) - starts

    def token_hash(self) -> str:
        """Hash of ids and boundaries; a feature batch must carry the hash of its own tokens."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.input_ids.contiguous().numpy().tobytes())
        digest.update(self.doc_starts.contiguous().numpy().tobytes())
        return digest.hexdigest()
