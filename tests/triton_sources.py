"""What tests of the kernels' sources share: the Triton they need, a process to compile in.

This process has Triton with its interpreter switched on (conftest.py), if it has it at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import triton
except ImportError:  # a CUDA build of torch may bring another version: see pyproject.toml
    triton = None

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "python"

_MISSING = triton is None or triton.__version__ != "3.6.0"
_REASON = "these are sources for Triton 3.6.0: pip install -e '.[kernels]' brings it"
needs_triton = pytest.mark.skipif(_MISSING, reason=_REASON)


def skip_module_without_triton() -> None:
    """To be called before a module imports what imports Triton."""
    if _MISSING:
        pytest.skip(_REASON, allow_module_level=True)


def compiling(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python code that may import `dflash_kernels` and compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"PYTHONPATH": str(PYTHON)} | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
