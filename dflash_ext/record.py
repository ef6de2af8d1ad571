"""What every kept result carries: date, commit, machine and versions, in one JSON file per run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def _commit() -> str:
    """Commit of the checkout this package runs from; "unknown" outside one."""
    if "DFLASH_COMMIT" in os.environ:  # a copied tree without .git says what it is a copy of
        return os.environ["DFLASH_COMMIT"]
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # installed: a repository further up would not be ours
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Date, commit, machine and versions of this run."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": platform.python_version(),
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """Write `result` beside its environment as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
