"""`best/` of a run folder: the weights with the largest accepted length so far.

Weights only, as `best/step-N` in the form of a checkpoint, with what was measured in record.json;
a training run goes on from checkpoints/, never from here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file
from torch import Tensor

from dflash_ext.checkpoint import (
    RECORD,
    CheckpointWriter,
    Progress,
    Snapshot,
    checkpoints,
    host_copy,
)
from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.ranks import Ranks
from dflash_ext.run import BEST_FOLDER

DECODED, VALIDATION = "decoded", "validation"


@dataclass(frozen=True)
class Record:
    """What made a step the best."""

    step: int
    accept_len: float
    measure: str
    """"decoded" (prompts, `eval.decode_every`) or "validation" (held-out blocks)."""


class Best:
    """All drafters decide alike; rank 0 writes, beside training."""

    def __init__(self, ranks: Ranks, run: Path | None, measure: str) -> None:
        """run: the run's folder on rank 0, whose word the others take."""
        self.measure = measure
        self.record = None if run is None else read_record(run)
        if run is not None and self.record is not None and self.record.measure != measure:
            shutil.rmtree(run / BEST_FOLDER)  # numbers of two measures do not compare
            self.record = None
        if not ranks.topology.shared and ranks.first:
            ranks.watch.publish(BEST_FOLDER, None if self.record is None else asdict(self.record))
        elif not ranks.topology.shared:
            told = cast(
                "dict[str, Any] | None", ranks.watch.wait_for(BEST_FOLDER, "reading rank 0's best")
            )
            self.record = None if told is None else Record(**told)
        self._writer = None if run is None else CheckpointWriter(run / BEST_FOLDER, keep=1)

    def consider(
        self, progress: Progress, accept_len: float, weights: Mapping[str, Tensor]
    ) -> None:
        """Keep the weights if they are better than any before.

        Sharded drafters all call this together.
        """
        if self.record is not None and accept_len <= self.record.accept_len:
            return
        self.record = Record(progress.position, accept_len, self.measure)
        sharded = any(hasattr(w, "full_tensor") for w in weights.values())
        if self._writer is not None or sharded:
            copied = {name: host_copy(w) for name, w in weights.items()}
            if self._writer is not None:
                self._writer.write(Snapshot(copied, {}, progress, asdict(self.record)))

    def wait(self) -> None:
        """Return when everything is on disk; raises what went wrong with it."""
        if self._writer is not None:
            self._writer.wait()


def read_record(run: Path) -> Record | None:
    """Of the best weights in a run's folder; None if there are none."""
    found = checkpoints(run / BEST_FOLDER)
    return Record(**json.loads((found[-1] / RECORD).read_text())) if found else None


def load_best(run: Path, config: DrafterConfig) -> Drafter:
    """The best drafter of a run that has one, fp32 on the CPU."""
    drafter = Drafter(config)
    drafter.load_state_dict(load_file(checkpoints(run / BEST_FOLDER)[-1] / "drafter.safetensors"))
    return drafter
