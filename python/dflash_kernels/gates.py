"""Gates on what ptxas made: no serialised matrix products, no spills in a loop of products.

Both cost tens of percent and change no result, so nothing else would show them. Pure functions of
the two texts that the compile step has: ptxas's log and cuobjdump's listing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# ptxas -v on wgmma: C7510, C7512, C7514, C7515 ... "... instructions are serialized due to ..."
_SERIALISED = re.compile(r"\((C75\d\d)\)[^\n]*wgmma[^\n]*serialized due to ([^\n]*?)(?: in the |$)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)")
_SPILLS = ("LDL", "STL")


def serialised_products(log: str) -> list[str]:
    """ptxas's complaints that it waits after every wgmma, as "C7514: reason"."""
    return [f"{code}: {reason.strip()}" for code, reason in _SERIALISED.findall(log)]


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str
    """Without the predicate: "HGMMA.64x64x16.F32.BF16", "BRA"."""
    conditional: bool
    target: int | None
    """Of a branch with a fixed target."""


def parse(sass: str) -> list[Instruction]:
    """The instructions of one function of `cuobjdump -sass`, in address order."""
    found = []
    for address, text in _INSTRUCTION.findall(sass):
        predicate, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
        opcode, _, operands = rest.strip().partition(" ")
        branches = opcode.split(".")[0] == "BRA"
        hexadecimal = _TARGET.findall(operands) if branches else []
        # `BRA UP0, 0x120` and `BRA.DIV UR4, 0x120` branch on an operand instead of a predicate.
        conditional = bool(predicate) or (branches and "," in operands)
        target = int(hexadecimal[-1], 16) if hexadecimal else None
        found.append(Instruction(int(address, 16), opcode, conditional, target))
    return found


def blocks_and_edges(
    code: list[Instruction],
) -> tuple[list[list[Instruction]], dict[int, set[int]]]:
    """Basic blocks in address order and the successors of each."""
    leaders = {code[0].address} | {i.target for i in code if i.target is not None}
    blocks: list[list[Instruction]] = []
    ended = True
    for instruction in code:
        if ended or instruction.address in leaders:
            blocks.append([])
        blocks[-1].append(instruction)
        ended = instruction.target is not None or instruction.opcode.startswith(("EXIT", "RET"))
    index = {block[0].address: n for n, block in enumerate(blocks)}
    edges: dict[int, set[int]] = {}
    for n, block in enumerate(blocks):
        last = block[-1]
        edges[n] = {index[last.target]} if last.target in index else set()
        leaves = last.target is not None or last.opcode.startswith(("EXIT", "RET"))
        if (last.conditional or not leaves) and n + 1 < len(blocks):
            edges[n].add(n + 1)
    return blocks, edges


def strong_components(nodes: Iterable[int], edges: dict[int, set[int]]) -> list[set[int]]:
    """Sets of at least one edge in which every node reaches every other, that is, loops."""
    members = set(nodes)
    order: list[int] = []
    seen: set[int] = set()
    for root in members:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(edges[root] & members))]
        while stack:
            node, successors = stack[-1]
            step = next((s for s in successors if s not in seen), None)
            if step is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(edges[step] & members)))
    before: dict[int, set[int]] = {n: set() for n in members}
    for n in members:
        for s in edges[n] & members:
            before[s].add(n)
    components, placed = [], set[int]()
    for root in reversed(order):
        if root in placed:
            continue
        component, todo = {root}, [root]
        placed.add(root)
        while todo:
            for p in before[todo.pop()] - placed:
                placed.add(p)
                component.add(p)
                todo.append(p)
        if len(component) > 1 or root in edges[root]:
            components.append(component)
    return components


def product_loops(
    nodes: Iterable[int], edges: dict[int, set[int]], products: set[int]
) -> list[set[int]]:
    """Loops that contain products and no smaller such loop.

    A persistent kernel is one loop over its items around the loops that count; a wait for a
    barrier is a loop inside of one. Neither is what this looks for.
    """
    found = []
    for loop in strong_components(nodes, edges):
        if not loop & products:
            continue
        entries = {s for n in edges if n not in loop for s in edges[n] & loop} or {min(loop)}
        cut = {n: targets - entries if n in loop else targets for n, targets in edges.items()}
        found += product_loops(loop, cut, products) or [loop]
    return found


def spills_in_product_loops(sass: str, expect_loops: bool = False) -> list[str]:
    """Local-memory accesses inside loops of matrix products, as "LDL at 0x3a40".

    Raises ValueError on a listing without instructions or, if they are expected, without loops:
    a listing that is not understood must not pass.
    """
    code = parse(sass)
    if not code:
        raise ValueError("no instructions in the listing")
    blocks, edges = blocks_and_edges(code)
    products = {n for n, block in enumerate(blocks) if any("MMA" in i.opcode for i in block)}
    loops = product_loops(range(len(blocks)), edges, products)
    if expect_loops and not loops:
        raise ValueError("no loop of matrix products in the listing")
    inside = set().union(*loops)
    return [
        f"{i.opcode.split('.')[0]} at {i.address:#x}"
        for n in sorted(inside)
        for i in blocks[n]
        if i.opcode.startswith(_SPILLS)
    ]
