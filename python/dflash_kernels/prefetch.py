"""Ask for a loop's next tiles early: a step of the compilation that Triton lacks.

Triton 3.6 pipelines tensor-map copies over two slots so that a turn of the loop ends with the
copies of what the next one begins with, and every turn waits for all of their latency. There is no
need to: the slot that they fill was last read by products of the turn before, and this turn's first
wait covers those. In front of its second one, behind the product that it is for, the copies have
nearly a turn's time; so they have behind the first, where there is no second. A third slot would do
the same, but takes the shared memory of a second program on the multiprocessor.

The order is changed in Triton's GPU dialect, behind its pipeliner and before it places barriers
between threads: which barriers the new order needs it finds out by itself.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

from triton._C.libtriton import ir

COPY = "ttng.async_tma_copy_global_to_local"
EXPECT = "ttng.barrier_expect"
WAIT = "ttng.warp_group_dot_wait"
ARRIVED = "ttng.wait_barrier"
# What their operands may be made with: it neither has an effect nor depends on one.
PURE = ("arith.", "ttg.memdesc_index")
_FILLED = re.compile(re.escape(COPY) + r" .*?\] (%\w+), ")  # by a copy, behind its coordinates
_SLOTS = re.compile(r"(%\w+) = ttg\.memdesc_index .*?: !ttg\.memdesc<(\d+)x")


class UnknownLoop(RuntimeError):
    """A loop with copies that is not built as Triton 3.6 builds it."""


def add_to_stages(
    backend: Any, stages: dict[str, Callable[..., Any]], options: Any, language: Any, sm: int
) -> None:
    """For `triton.knobs.runtime.add_stages_inspection_hook`, which may change the stages."""
    if "ttir" not in stages:
        return  # Gluon: its kernels say themselves when they copy
    to_gpu_dialect = stages["ttgir"]

    def and_prefetch(source: Any, metadata: dict[str, Any]) -> Any:
        module = to_gpu_dialect(source, metadata)
        text = str(module)
        if COPY not in text:
            return module
        with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
            file.write(copies_early(text))
            file.flush()
            ordered = ir.parse_mlir_module(file.name, module.context)
        ordered.context = module.context
        return ordered

    stages["ttgir"] = and_prefetch


def copies_early(text: str) -> str:
    """The module, with the copies of each of its loops moved in front of a turn's second wait, or
    behind its only one.

    By then one wait has freed the slot, and where there are two the next product is on its way.

    Raises:
        UnknownLoop: a loop with copies does not wait for every product, perhaps for another, and
            only then copy; it has not waited for all that was copied for this turn by then; its
            copies depend on more than arithmetic, or fill a tile's only slot; or no loop copies.
    """
    lines = text.split("\n")
    begin = None
    found = False
    for i, line in enumerate(lines):
        if " scf.for " in line:
            begin = i  # of an innermost loop, by the time its end is met
        elif begin is not None and line.startswith(_indent(lines[begin]) + "}"):
            turn = _operations(lines[begin + 1 : i])
            if any(COPY in operation for operation in turn):
                lines[begin + 1 : i] = "\n".join(_early(turn)).split("\n")
                found = True
            begin = None
    if not found:
        raise UnknownLoop("no innermost loop copies")
    return "\n".join(lines)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _operations(lines: list[str]) -> list[str]:
    """The operations of a block that has no loops, each with the lines of its regions."""
    start = re.compile(_indent(lines[0]) + r"[%a-z]")
    made: list[str] = []
    for line in lines:
        if start.match(line):
            made.append(line)
        else:
            made[-1] += "\n" + line
    return made


def _early(turn: list[str]) -> list[str]:
    waits = [i for i, operation in enumerate(turn) if WAIT in operation]
    wanted = [i for i, operation in enumerate(turn) if COPY in operation or EXPECT in operation]
    if not waits or "pendings = 0 " not in turn[waits[0]]:
        raise UnknownLoop("a loop that copies does not first wait for every product")
    at = waits[1] if len(waits) > 1 else waits[0] + 1
    if wanted[0] < at:
        raise UnknownLoop("a loop copies before its waits")
    if any(ARRIVED in operation for operation in turn[at:]):
        raise UnknownLoop("a loop waits for copies of its own turn after the next ones' place")
    text = "\n".join(turn)
    slots = dict(_SLOTS.findall(text))
    filled = [int(slots.get(slot, 1)) for slot in _FILLED.findall(text)]
    if len(filled) < text.count(COPY) or min(filled) < 2:
        raise UnknownLoop("a loop copies into the slot that it reads")
    results: dict[str, int] = {}
    actions = []
    for i, operation in enumerate(turn):
        result, action = re.findall(r"^ *(?:(%\w+)(?::\d+)? = )?(.*)", operation)[0]
        results[result] = i
        actions.append(action)
    moved: set[int] = set()
    while wanted:
        i = wanted.pop()
        if i < at or i in moved:
            continue
        if not actions[i].startswith((COPY, EXPECT, *PURE)):
            raise UnknownLoop(f"a loop's copies depend on {turn[i].strip()}")
        moved.add(i)
        wanted += [results[x] for x in re.findall(r"%\w+", actions[i]) if x in results]
    later = [turn[i] for i in range(at, len(turn)) if i not in moved]
    return [*turn[:at], *(turn[i] for i in sorted(moved)), *later]
