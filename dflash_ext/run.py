"""A run's surroundings: its device, its folder, its options on disk, its interruption."""

from __future__ import annotations

import fcntl
import itertools
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

import torch

from dflash_ext.checkpoint import checkpoints
from dflash_ext.config import RunOptions, TrainConfig, to_json
from dflash_ext.errors import UserError

DEFAULT_RUN = Path("runs/quickstart")
OPTIONS_FILE, LOCK_FILE = "options.json", "run.lock"
BEST_FOLDER = "best"
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


def _is_foreign(folder: Path) -> bool:
    """Does `folder` hold things that are not a run's? Nothing in it may then be touched."""
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from None
    return bool(names - {LOCK_FILE}) and OPTIONS_FILE not in names


def _lock(folder: Path) -> IO[str] | None:
    """Lock `folder`, made private to the user if it is new; None if another run holds it.

    The lock ends with the handle or its process, so a killed run blocks nobody.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
        handle = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be a run folder ({error.strerror}): give --run.dir a writable folder"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def _used(folder: Path) -> bool:
    return bool(checkpoints(folder / "checkpoints"))


def _newest_run() -> Path | None:
    """The run beside the default one, under any name, that saved a checkpoint last."""
    found = [file.parent for file in DEFAULT_RUN.parent.glob(f"*/{OPTIONS_FILE}")]
    saved = [folder for folder in found if _used(folder)]
    return max(saved, key=lambda f: (f / "checkpoints").stat().st_mtime, default=None)


def _claim(options: RunOptions) -> tuple[Path, IO[str]]:
    """The folder of this run and the lock on it. A new run never writes into a used folder."""
    folder = options.dir
    if folder is None and options.resume == "auto":
        folder = _newest_run()
    if folder is not None:
        if _is_foreign(folder):
            raise UserError(
                f"{folder} is not empty and has no {OPTIONS_FILE}, so it is not a run's folder: "
                "choose a new or empty --run.dir"
            )
        lock = _lock(folder)
        if lock is None:
            raise UserError(f"{folder} is in use by another run: choose another --run.dir")
        if options.resume == "never" and _used(folder):
            lock.close()
            raise UserError(
                f"{folder} holds the checkpoints of a run: continue it with --run.resume auto "
                "or choose another --run.dir"
            )
        return folder, lock
    for number in itertools.count(1):
        name = DEFAULT_RUN.name if number == 1 else f"{DEFAULT_RUN.name}-{number}"
        folder = DEFAULT_RUN.with_name(name)
        lock = None if _is_foreign(folder) else _lock(folder)
        if lock is not None:
            if not _used(folder):
                return folder, lock
            lock.close()
    raise AssertionError("unreachable")


@contextmanager
def claim_run(config: TrainConfig) -> Iterator[tuple[Path, Path | None]]:
    """(run folder, checkpoint to continue from or None); no other run has it inside the block.

    A starting run saves its options as options.json and removes what an unfinished one without a
    checkpoint left behind. UserError if the folder is not a run's to use, or if a resumed run would
    train something else.
    """
    folder, lock = _claim(config.run)
    with lock:
        yield folder, _open(folder, config)


def _open(folder: Path, config: TrainConfig) -> Path | None:
    file, saved = folder / OPTIONS_FILE, checkpoints(folder / "checkpoints")
    if not saved:
        for name in PER_RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / BEST_FOLDER, ignore_errors=True)
        file.write_text(to_json(config))
        return None
    options, before = json.loads(to_json(config)), json.loads(file.read_text())
    for found in (options, before):
        found["batch"].pop("accumulate")  # may follow the number of drafters
    sections = ("target", "data", "drafter", "loss", "optim", "batch", "steps", "epochs", "seed")
    for section in sections:
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
