"""What the attention benchmark measures, and what it must reach: shapes, sweeps, floors, goals.

Plain data and arithmetic; nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Shape:
    name: str
    documents: tuple[int, ...]
    """Token counts of the packed documents."""
    num_blocks: int
    B: int
    Hq: int
    Hkv: int
    D: int
    window: int | None = None
    causal: bool = False

    @property
    def T(self) -> int:
        return sum(self.documents)

    @property
    def what(self) -> str:
        """One line for tables; heads, D, B and the options are said where they vary."""
        n = len(self.documents)
        return f"{self.T:,} tokens, {n} document{'s' if n > 1 else ''}, {self.num_blocks:,} blocks"


def lognormal_documents(total: int, mean: float, seed: int = 0) -> tuple[int, ...]:
    """Realistic document lengths (sigma 0.7, 64 to 8192 tokens) that sum to `total`."""
    g = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = int(min(max(64.0, (torch.randn(1, generator=g) * 0.7).exp().item() * mean), 8192))
        lengths.append(min(drawn, left))
    return tuple(lengths)


# The anchors' own shapes: 4k in one document, 8 x 2k, 48k packed at real lengths, 32k in one.
CUDA_SHAPES = (
    Shape("A", (4096,), 512, 16, 32, 8, 128),
    Shape("B", (2048,) * 8, 1024, 16, 32, 8, 128),
    Shape("C", lognormal_documents(49152, 1500), 2048, 16, 32, 8, 128),
    Shape("D", (32768,), 512, 16, 32, 8, 128),
)
CPU_SHAPES = (
    Shape("quickstart, 8 x 200", (200,) * 8, 128, 8, 9, 3, 64),
    Shape("4 x 512", (512,) * 4, 256, 16, 9, 3, 64),
)

# Every sweep moves one thing away from BASE, which is long enough for both windows to matter.
BASE = Shape("base", (8192,), 1024, 16, 32, 8, 128)
WINDOWS = tuple((w, c) for w in (None, 512, 2048) for c in (False, True))


def sweeps() -> tuple[tuple[str, Shape], ...]:
    """(sweep, shape) of every row; BASE itself comes first, once."""
    rows = [("base", BASE)]
    for T in (2048, 4096, 16384, 32768, 65536):
        rows.append(("T", replace(BASE, name=f"T {T:,}", documents=(T,))))
    for n in (16, 64, 256, 4096):
        rows.append(("N", replace(BASE, name=f"N {n:,}", num_blocks=n)))
    for size in (4, 8, 32):
        rows.append(("B", replace(BASE, name=f"B {size}", B=size)))
    for G in (1, 2, 8):
        rows.append(("G", replace(BASE, name=f"G {G}", Hkv=BASE.Hq // G)))
    for D in (64, 256):
        rows.append(("D", replace(BASE, name=f"D {D}", D=D)))
    for window, causal in WINDOWS[1:]:
        name = f"window {window or 'none'}{', causal block' if causal else ''}"
        rows.append(("window", replace(BASE, name=name, window=window, causal=causal)))
    return tuple(rows)


# Never launched by anything else in a run: odd lengths, and every option of the kernels once.
UNSEEN = (
    Shape("u1", (5333,), 515, 16, 32, 8, 128),
    Shape("u2", (1231, 3001, 777), 611, 8, 16, 4, 128),
    Shape("u3", (9973,), 389, 16, 32, 8, 64),
    Shape("u4", (2203, 2203), 801, 16, 32, 16, 128, window=601),
    Shape("u5", (4001, 97), 403, 8, 32, 4, 128, causal=True),
    Shape("u6", (3449,), 257, 4, 16, 2, 256),
)
WARM = Shape("warm", (12288,), 1024, 16, 32, 8, 128)


class Target(NamedTuple):
    floor: float
    """Below it the work is not done."""
    goal: float | None = None


# Measure (a row's key) -> shape -> target; larger is better. Beside the ratios to the
# 8192^3 product: those to compiled flex_attention in the same run.
TARGETS: dict[str, dict[str, Target]] = {
    "fwd_over_product": {
        "A": Target(0.83, 0.90),
        "B": Target(0.74, 0.82),
        "C": Target(0.74, 0.82),
        "D": Target(0.86, 0.93),
    },
    "bwd_over_product": {
        "A": Target(0.60, 0.67),
        "B": Target(0.57, 0.64),
        "C": Target(0.57, 0.65),
        "D": Target(0.69, 0.76),
    },
    "triton_fwd_over_product": {
        "A": Target(0.62),
        "B": Target(0.53),
        "C": Target(0.53),
        "D": Target(0.71),
    },
    "triton_bwd_over_product": {
        "A": Target(0.53),
        "B": Target(0.51),
        "C": Target(0.49),
        "D": Target(0.59),
    },
    "fwd_over_flex": {
        "A": Target(1.9, 2.0),
        "B": Target(2.2, 2.4),
        "C": Target(2.4, 2.6),
        "D": Target(1.5, 1.65),
    },
    "bwd_over_flex": {
        "A": Target(2.3, 2.6),
        "B": Target(3.0, 3.4),
        "C": Target(3.8, 4.2),
        "D": Target(1.5, 1.65),
    },
}
# Smaller is better: of `bench step`, ms of forward + loss + backward, and GiB at the peak.
STEP_LIMITS: dict[tuple[str, str], dict[str, Target]] = {
    ("qwen3-8b", "1 x 4096, 512 anchors"): {"step": Target(122), "peak": Target(12)},
    ("qwen3-8b", "4 x 4096, 512 anchors each"): {
        "step": Target(460, 430),
        "peak": Target(24, 20),
    },
}
# Of `bench target`, larger is better: speed over plain transformers, by shape and batch.
FORWARD_OVER_PLAIN = {
    ("qwen3-8b", "12 x 4096"): Target(1.35, 1.42),
    ("qwen3-8b", "length mix"): Target(1.45, 1.6),
}
FP8_OVER_BF16 = Target(1.4)
"""tokens/s of a target in FP8 over our own in bf16."""
FORWARD_MEMORY = Target(1.3)
"""Smaller is better: the peak over weights and output."""
LAYOUT_MS = Target(0.1, 0.03)
WINDOW_OVERHEAD = Target(0.05)


def reached(value: float, target: Target, smaller: bool = False) -> str:
    """ "goal", "floor" or "below floor", for one measured value."""
    sign = -1 if smaller else 1
    if target.goal is not None and sign * value >= sign * target.goal:
        return "goal"
    return "floor" if sign * value >= sign * target.floor else "below floor"


def missed(row: dict[str, Any]) -> list[str]:
    """One line for every floor that a row of the shapes A-D misses."""
    lines = []
    for key, targets in TARGETS.items():
        if key in row and row["shape"] in targets:
            value, target = row[key], targets[row["shape"]]
            if reached(value, target) == "below floor":
                lines.append(f"{row['shape']}: {key} {value:.3f} is below {target.floor}")
    if row.get("layout_ms", 0.0) > LAYOUT_MS.floor:
        lines.append(f"{row['shape']}: layout_ms {row['layout_ms']:.3f} is above {LAYOUT_MS.floor}")
    return lines
