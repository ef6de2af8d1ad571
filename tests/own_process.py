"""Code in a process of its own that allocates device memory as a training run does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_by(code: str) -> str:
    """Its last line of output. `code` may import tests' modules."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    before = "from dflash_ext.torch_api import share_device_memory; share_device_memory(); "
    done = subprocess.run(
        [sys.executable, "-c", before + code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
