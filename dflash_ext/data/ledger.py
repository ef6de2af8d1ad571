"""Which rows were read before: what makes a store extensible, resumable and free of duplicates.

A row is known by a hash of its JSON text, wherever it stands. The store logs that hash for every
row it has read, so reading the same sources again, in any order and with others among them, leads
to exactly the rows that are new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

KNOWN, DUPLICATE, NEW = range(3)


def row_key(row: bytes) -> int:
    """64-bit hash of a row's text."""
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little")


class Ledger:
    """Rows logged by a store so far, and those met since."""

    def __init__(self, logged: np.ndarray, content: np.ndarray) -> None:
        """logged: uint64 [rows], keys of all rows read; content: uint64, keys of all samples."""
        # Arrays, not a dict: a million rows are 16 MB instead of 150.
        self._logged, self._left = np.unique(logged, return_counts=True)
        self._new: set[int] = set()
        self._content = set(content.tolist())

    def classify(self, keys: np.ndarray) -> list[int]:
        """KNOWN, DUPLICATE or NEW of each of the rows with these keys, uint64 [r], in order.

        KNOWN: the log holds this very occurrence. DUPLICATE: it only holds earlier ones.
        """
        places = np.searchsorted(self._logged, keys)
        places[places == len(self._logged)] = 0
        hits = (self._logged[places] == keys) if len(self._logged) else np.zeros(len(keys), bool)
        found = []
        for key, place, hit in zip(keys.tolist(), places.tolist(), hits.tolist()):
            if hit and self._left[place] > 0:
                self._left[place] -= 1
                found.append(KNOWN)
            elif hit or key in self._new:
                found.append(DUPLICATE)
            else:
                self._new.add(key)
                found.append(NEW)
        return found

    def is_new_content(self, key: int) -> bool:
        """Is this the first row with these tokens? Remembers it."""
        if key in self._content:
            return False
        self._content.add(key)
        return True


def row_keys(rows: Iterable[bytes]) -> np.ndarray:
    """uint64 [r]: `row_key` of each row."""
    return np.array([row_key(row) for row in rows], dtype=np.uint64)
