"""What a run trains on, by content: kept in its folder, the same on every rank, allowed to grow.

Each epoch trains on one state of the training data. A resumed run that finds its store extended
goes on with the epoch it is in, on the samples it began it with, and uses the longer state in every
later epoch. Which state an epoch uses is written down, so it is the same after any further stop.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from dflash_ext.checkpoint import read_progress
from dflash_ext.config import TrainConfig
from dflash_ext.data.store_files import cache_key, replace_json
from dflash_ext.data.synthesis import config_identity, weight_samples
from dflash_ext.errors import UserError
from dflash_ext.monitor import Monitor
from dflash_ext.plan import PLANNER, Schedule
from dflash_ext.ranks import Ranks
from dflash_ext.samples import Samples, as_begun, schedule_of
from dflash_ext.target import Target

IDENTITY_FILE = "identity.json"
TRAINING, HELD_OUT, WEIGHTS = "training data", "held-out data", "target's weights"
ORDER = "planner of batches in this version of dflash_ext"


@dataclass(frozen=True)
class Identity:
    """Hashes of everything a run trains on. Paths stay when the files behind them are edited."""

    began: dict[str, str]
    """What it is -> hash of its content, when the run began."""
    grown: tuple[tuple[int, str], ...] = ()
    """(first epoch, from 0; hash of the training data) of every later state, in order of time."""
    weights: dict[str, str] = field(default_factory=dict)
    """A part of the target (a layer, the embedding) -> hash of its weights. A rank knows those that
    it loaded, rank 0 those of all ranks."""

    @classmethod
    def of(cls, target: Target, train_set: Samples, held_out: Samples) -> Identity:
        """What is there now."""
        return cls(
            {
                "target's config": config_identity(target.model.config),
                "target's dtype": str(target.model.dtype),
                TRAINING: train_set.store.identity,
                HELD_OUT: held_out.store.identity,
                ORDER: PLANNER,
            },
            weights=weight_identities(target.model),
        )

    @classmethod
    def from_json(cls, value: Any) -> Identity:
        grown = tuple((int(e), str(i)) for e, i in value["grown"])
        return cls(dict(value["began"]), grown, dict(value["weights"]))

    @property
    def states(self) -> list[tuple[int, str]]:
        """(first epoch, hash of the training data) of all states."""
        return [(0, self.began[TRAINING]), *self.grown]

    def growing(self, epoch: int, training: str) -> Identity:
        """With another state from `epoch` on, instead of any that was to begin there or later."""
        kept = tuple(state for state in self.grown if state[0] < epoch)
        return replace(self, grown=(*kept, (epoch, training)))

    def differing(self, now: Identity, data: tuple[Samples, Samples]) -> str | None:
        """The name of something that is not as it was nor an extension of it, if there is."""
        train, held = (samples.store for samples in data)
        for name, value in now.began.items():
            if name == TRAINING:
                same = all(train.prefix(state) is not None for _, state in self.states)
            elif name == HELD_OUT:
                same = held.prefix(self.began[name]) is not None
            else:
                same = self.began.get(name) == value
            if not same:
                return name
        known = now.weights.items()
        return None if all(self.weights.get(n, v) == v for n, v in known) else WEIGHTS


def weight_identities(model: nn.Module) -> dict[str, str]:
    """`Identity.weights` of what is loaded of a target."""
    parts: dict[str, dict[str, Any]] = {}
    for name, sample in weight_samples(model).items():
        pieces = name.split(".")
        layer = next((i for i, piece in enumerate(pieces) if piece.isdigit()), len(pieces))
        parts.setdefault(".".join(pieces[: layer + 1]), {})[name] = sample
    return {part: cache_key(samples) for part, samples in parts.items()}


def settle(
    config: TrainConfig,
    ranks: Ranks,
    folder: Path | None,
    checkpoint: Path | None,
    target: Target,
    data: tuple[Samples, Samples],
    monitor: Monitor,
) -> tuple[Samples, Samples, Schedule]:
    """(training samples, held-out samples, plan) of a run, by rank 0's word.

    `data`: training and held-out samples as they are now. Rank 0 keeps their identity in the run's
    folder. UserError if a resumed run finds other ones than it began with, or this rank others than
    rank 0.
    """
    now = Identity.of(target, *data)
    if not ranks.first:
        ranks.watch.publish(f"weights/{ranks.rank}", now.weights)
        told = ranks.watch.wait_for("identity", "waiting for rank 0's data")
        return planned(config, data, agreed(Identity.from_json(told), now, data, ranks.rank))
    assert folder is not None
    for rank in range(1, ranks.topology.world_size):
        told = ranks.watch.wait_for(f"weights/{rank}", f"waiting for rank {rank}'s target")
        now = replace(now, weights=cast("dict[str, str]", told) | now.weights)
    if checkpoint is None:
        identity = now
        settled = planned(config, data, identity)
    else:
        identity = kept_identity(folder, now, data)
        settled = planned(config, data, identity)
        training = now.began[TRAINING]
        if identity.states[-1][1] != training:
            progress = read_progress(checkpoint)
            assert progress.course is not None
            epoch = settled[2].untouched(progress.course.begun(progress.position))
            before = len(settled[0].indices)
            identity = identity.growing(epoch, training)
            settled = planned(config, data, identity)
            ends = config.epochs is not None and epoch >= config.epochs
            monitor.say(
                f"the data grew from {before} to {len(settled[0].indices)} samples: epochs from "
                f"{epoch} on (counted from 0) use all of them"
                + (", this run ends before" if ends else "")
            )
    # Only what can be trained on is noted: a sample too long for a batch was found by now.
    replace_json(folder / IDENTITY_FILE, asdict(identity))
    if not ranks.topology.shared:
        ranks.watch.publish("identity", asdict(identity))
    return settled


def planned(
    config: TrainConfig, data: tuple[Samples, Samples], identity: Identity
) -> tuple[Samples, Samples, Schedule]:
    """The samples that `data` were and are in the states of an identity, and the plan for them."""
    states = identity.states
    train_set, held_out = as_begun(config, data, [i for _, i in states], identity.began[HELD_OUT])
    return train_set, held_out, schedule_of(config, train_set, states)


def kept_identity(folder: Path, now: Identity, data: tuple[Samples, Samples]) -> Identity:
    """What a resumed run has trained on; UserError if that is not what is there now."""
    file = folder / IDENTITY_FILE
    if not file.exists():
        raise UserError(f"{file} is missing, so the run cannot be continued: start another one")
    try:
        identity = Identity.from_json(json.loads(file.read_text()))
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{file} is damaged or of another version, so the run cannot be continued: start "
            "another one"
        ) from None
    if name := identity.differing(now, data):
        raise UserError(
            f"the {name} changed since the run in {folder} began: restore what it was, or "
            "start in another --run.dir (a store may grow under a run, a file of rows may not)"
        )
    return replace(identity, weights=now.weights | identity.weights)


def agreed(told: Identity, now: Identity, data: tuple[Samples, Samples], rank: int) -> Identity:
    """What rank 0 told; UserError if this rank's data or target is not rank 0's."""
    if name := told.differing(now, data):
        raise UserError(
            f"the {name} on rank {rank} differs from rank 0's: give all machines the same files, "
            "and a DFLASH_CACHE they share if the target writes the data"
        )
    return told
