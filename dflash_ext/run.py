"""A run's surroundings: its device, its folder, its options on disk, its interruption."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from dflash_ext.checkpoint import checkpoints
from dflash_ext.config import RunOptions, TrainConfig, to_json
from dflash_ext.errors import UserError

DEFAULT_RUN = Path("runs/quickstart")
PER_RUN_FILES = ("metrics.jsonl", "generations.json", "results.json")


def resolve_device(name: str) -> torch.device:
    """The device of a run. UserError if it is not there."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(automatic if name == "auto" else name)
    except RuntimeError:
        raise UserError(f"device '{name}' is unknown: use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device '{name}' is not available: torch sees no GPU; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is not supported: use auto, cpu or cuda")
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def run_folder(options: RunOptions) -> Path:
    """The folder of this run. A new run never writes into one that has checkpoints."""

    def used(folder: Path) -> bool:
        return bool(checkpoints(folder / "checkpoints"))

    if options.dir is not None:
        if options.resume == "never" and used(options.dir):
            raise UserError(
                f"{options.dir} holds the checkpoints of a run: continue it with --run.resume auto "
                "or choose another --run.dir"
            )
        return options.dir
    folder, number = DEFAULT_RUN, 1
    while used(folder):
        following = DEFAULT_RUN.with_name(f"{DEFAULT_RUN.name}-{number + 1}")
        if options.resume == "auto" and not used(following):
            break
        folder, number = following, number + 1
    return folder


def open_run(folder: Path, config: TrainConfig) -> Path | None:
    """The newest checkpoint of the run in `folder`, or None for a run that starts.

    A starting run saves its options as options.json and removes what an unfinished one without a
    checkpoint left behind. UserError if a resumed run would train something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    file, saved = folder / "options.json", checkpoints(folder / "checkpoints")
    if not saved:
        for name in PER_RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        file.write_text(to_json(config))
        return None
    options, before = json.loads(to_json(config)), json.loads(file.read_text())
    for section in ("target", "data", "drafter", "loss", "optim", "batch", "steps", "seed"):
        if options[section] != before[section]:
            raise UserError(
                f"{file} has {section} {before[section]}, the options say {options[section]}: "
                "resume with the options of the run, or start in another --run.dir"
            )
    return saved[-1]


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Inside, the first SIGINT or SIGTERM only sets a flag (returned as a function).

    The loop then saves and ends after its step; a second signal acts as ever.
    """
    raised = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield raised.is_set  # signals reach the main thread only
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def take(_number: int, _frame: FrameType | None) -> None:
        raised.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, take)
    try:
        yield raised.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
