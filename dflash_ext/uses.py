"""How often each sample was trained on: kept in every checkpoint, compared with the plan.

A checkpoint holds weights and these counts together, so after any number of kills the counts of the
last one say what is really in the weights (requirement 20).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dflash_ext.checkpoint import Progress
from dflash_ext.parallel import sum_over
from dflash_ext.plan import Schedule
from dflash_ext.samples import Samples


def planned_uses(schedule: Schedule, batches: int) -> np.ndarray:
    """int32 [samples]: uses of each sample by the plan's first `batches` feature batches."""
    epoch, index = schedule.locate(batches)
    done = [sample for group in schedule.epoch(epoch)[:index] for sample in group]
    counts = np.bincount(np.array(done, dtype=np.int64), minlength=len(schedule.lengths))
    # A whole epoch used its first so many samples; the data only grow, so the sizes are sorted.
    sizes = [schedule.samples_in(whole) for whole in range(epoch)]
    without = np.searchsorted(sizes, np.arange(len(counts)), side="right")
    return (counts + epoch - without).astype(np.int32)


class Uses:
    """One drafter's own uses, and the sum over all drafters when asked."""

    def __init__(self, samples: Samples, schedule: Schedule) -> None:
        self._indices, self._schedule = samples.indices, schedule
        self._uses = np.zeros(len(samples.store), dtype=np.int32)

    def use(self, sample_ids: Sequence[int]) -> None:
        """These samples of the store are being trained on (all draws of a batch are one use)."""
        np.add.at(self._uses, np.asarray(sample_ids), 1)

    def restore(self, uses: torch.Tensor, progress: Progress) -> None:
        """Continue from a checkpoint's counts, on one drafter; the others begin at zero.

        They may be of fewer samples: data that grew since then kept the old ones in their places.
        """
        uses = torch.nn.functional.pad(uses, (0, max(0, len(self._indices) - len(uses))))
        self._check(uses, progress)
        self._uses[self._indices] = uses.numpy()

    def total(self, group: Any, device: torch.device, progress: Progress) -> torch.Tensor:
        """int32 [training samples], on the CPU: uses by all drafters of `group` (None: just this).

        All drafters call it together. RuntimeError unless the plan's batches until `progress` were
        used as planned: each sample once per epoch.
        """
        uses = torch.from_numpy(self._uses[self._indices])
        if group is None:
            uses = uses.clone()
        else:
            uses = uses.to(device)
            sum_over(group, [uses])
            uses = uses.cpu()
        self._check(uses, progress)
        return uses

    def _check(self, uses: torch.Tensor, progress: Progress) -> None:
        assert progress.course is not None
        batches = progress.course.begun(progress.position)
        planned = planned_uses(self._schedule, batches)
        wrong = np.flatnonzero(planned != uses.numpy())
        if len(wrong):
            sample = int(wrong[0])
            raise RuntimeError(
                f"sample {int(self._indices[sample])} was trained on {int(uses[sample])} times, "
                f"the plan says {int(planned[sample])} ({len(wrong)} samples differ after "
                f"{batches} feature batches): this is a fault of the program, please report it"
            )
