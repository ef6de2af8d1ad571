"""Which decoder layers of a target are tapped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_ext.errors import UserError


def default_tap_ids(num_layers: int, K: int = 5) -> tuple[int, ...]:
    """K layers evenly spread from 1 to n-3, rounded; a model too small for that uses all it has."""
    if num_layers < 1 or K < 1:
        raise UserError(f"{num_layers} layers and {K} taps: both must be at least 1")
    first, last = (1, num_layers - 3) if num_layers - 3 >= K else (0, num_layers - 1)
    K = min(K, num_layers)
    return tuple(round(x) for x in np.linspace(first, last, K).tolist())


def check_tap_ids(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Tap ids as a tuple. UserError unless they are distinct decoder layers of the target."""
    ids = tuple(int(i) for i in tap_ids)
    wrong = [i for i in ids if not 0 <= i < num_layers]
    if wrong or not ids or len(set(ids)) != len(ids):
        raise UserError(
            f"target_layer_ids {list(ids)}: expected distinct ids from 0 to {num_layers - 1} "
            f"(the target has {num_layers} decoder layers), got {wrong or list(ids)}"
        )
    return ids


def chosen_taps(tap_ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The taps given, or the default ones. UserError as `check_tap_ids`."""
    return default_tap_ids(num_layers) if tap_ids is None else check_tap_ids(tap_ids, num_layers)
