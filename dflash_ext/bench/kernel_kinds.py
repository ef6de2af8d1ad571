"""Where time on the device goes: kernels by kind, told apart by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from dflash_ext.bench.markdown import Row, Rows, markdown
from dflash_ext.bench.timing import Run, tidy

# The first kind with a part of the name has it; in lower case. Attention comes first, because its
# kernels are named after the library of products they are made of, too.
KINDS = {
    "attention": ("attention", "hopper_", "fmha", "flash", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "loss": ("vocabulary_",),
    "row-wise": (
        *("elementwise", "rms_norm", "swiglu", "head_norm", "quantise", "reduce", "catarray"),
        *("copy", "cast", "multi_tensor"),
    ),
}
REST = "rest"


class Kernel(NamedTuple):
    name: str
    calls: int
    ms: float
    """Of all calls."""


def kind_of(name: str) -> str:
    lower = name.lower()
    for kind, parts in KINDS.items():
        if any(part in lower for part in parts):
            return kind
    return REST


def kernels_of(run: Run) -> list[Kernel]:
    """Kernels (and copies) of one call on the current GPU, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [
        Kernel(event.key, event.count, event.self_device_time_total / 1e3)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)


def by_kind(kernels: Iterable[Kernel]) -> dict[str, float]:
    """ms of each kind; those without a kernel too."""
    total = dict.fromkeys((*KINDS, REST), 0.0)
    for kernel in kernels:
        total[kind_of(kernel.name)] += kernel.ms
    return total


def kinds_of(run: Run) -> dict[str, Any]:
    """For a result: ms of one call by kind, and its longest kernels."""
    kernels = kernels_of(run)
    return tidy(by_kind(kernels)) | {"longest": longest(kernels)}


def line(row: Mapping[str, Any]) -> str:
    """For the terminal: a row without its kernels, and a line for each way under its "kinds"."""
    text = " ".join(f"{key} {value}" for key, value in row.items() if key != "kinds")
    for way, shares in row.get("kinds", {}).items():
        parts = " ".join(f"{kind} {ms}" for kind, ms in shares.items() if kind != "longest")
        text += f"\n  {way}, ms: {parts}"
    return text


def kinds_table(rows: Rows, who: str) -> str:
    """Of rows with "kinds": ms and share of each kind. who: key and heading of what was run."""
    shown, found = list[Row](), set[str]()
    for row in rows:
        for way, times in row.get("kinds", {}).items():
            ms = {kind: x for kind, x in times.items() if kind != "longest"}
            found |= {kind for kind, x in ms.items() if x}
            whole = sum(ms.values())
            named = {who: row[who], "case": row["case"], "way": way, "ms": whole}
            shown.append(named | {kind: f"{x:.0f} ({x / whole:.0%})" for kind, x in ms.items()})
    columns = [(who, who, "{}"), ("batch", "case", "{}"), ("what", "way", "{}")]
    columns += [("kernels, ms", "ms", "{:.0f}")]
    kinds = [kind for kind in (*KINDS, REST) if kind in found]
    return markdown([*columns, *((kind, kind, "{}") for kind in kinds)], shown) if shown else ""


def longest(kernels: Iterable[Kernel], count: int = 40) -> list[dict[str, Any]]:
    """For a result: a name that stands under the wrong kind can be seen there."""
    return [
        {"name": k.name[:120], "kind": kind_of(k.name), "calls": k.calls, "ms": round(k.ms, 3)}
        for k in sorted(kernels, key=lambda k: -k.ms)[:count]
    ]
