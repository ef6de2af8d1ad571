"""Compile one kernel at one head_dim for every architecture, with no GPU, driver, torch or nvcc.

    python -m dflash_kernels.compile KERNEL HEAD_DIM OUT_DIR SM [SM ...]

Writes OUT_DIR/<stem>.bin (a cubin, or the text of the fallback PTX) and <stem>.json (what the
launcher and the report need) per variant. Fails, naming the variant, when the image would
not run (too much shared memory, parameters other than the C++ launcher will pass) or would run far
below its tile's speed (serialised matrix products, spills in a loop of products: gates.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # byte-reproducible images, 2-4x smaller
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # printed by Triton; `compile_variant` catches it
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # an image from the cache comes without that log

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from dflash_kernels.gates import serialised_products, spills_in_product_loops
from dflash_kernels.spec import TYPES, Argument, Computed, TensorMap, VectorMap, check_signature
from dflash_kernels.variants import Variant, kernel_named, unit_variants

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Appended by Triton to every kernel: global and profile scratch, both unused here.
SCRATCH_PARAMETERS = ["u64", "u64"]


class GateError(RuntimeError):
    """The compiled image must not be shipped."""


def compile_variant(variant: Variant) -> tuple[Any, str]:
    """Triton's compiled kernel and what ptxas said about it."""
    kernel = variant.kernel
    constants = dict(variant.constants)
    num_warps = constants.pop("num_warps")
    signature: dict[str, str] = {}
    promises: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = kernel.arguments[name]
        signature[name] = signature_type(kind, constants, kernel.fn.is_gluon())
        if isinstance(kind, str) and TYPES[kind][3] > 1:
            promises[(index,)] = [["tt.divisibility", TYPES[kind][3]]]
    source = (GluonASTSource if kernel.fn.is_gluon() else ASTSource)(
        kernel.fn, signature, constants, promises
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        target = GPUTarget("cuda", variant.sm, 32)
        compiled = triton.compile(source, target=target, options=options)
    return compiled, log.getvalue()


def signature_type(kind: Argument, constants: dict[str, Any], gluon: bool) -> str:
    """The type as Triton's signature spells it; plain Triton chooses a map's layout itself."""
    if isinstance(kind, TensorMap):
        block = [constants[n] if isinstance(n, str) else n for n in kind.block]
        if not gluon:
            return f"tensordesc<bf16{block}>"
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        return f"tensordesc<bf16{block},{layout!r}>"
    if isinstance(kind, VectorMap):
        layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        return f"tensordesc<fp32[{kind.box}],{layout!r}>"
    return "i32" if isinstance(kind, Computed) else TYPES[kind][0]


def passed_parameters(kind: Argument) -> list[str]:
    """PTX parameters of one argument: a map is 128 bytes, its extents (i32) and strides (i64)."""
    if isinstance(kind, (TensorMap, VectorMap)):
        return ["u8[128]", *["u32"] * kind.rank, *["u64"] * kind.rank]
    return ["u32" if isinstance(kind, Computed) else TYPES[kind][2]]


def ptx_parameters(ptx: str) -> list[str]:
    """Types of the entry's parameters in order, integers and pointers by width only."""
    entry = ptx[ptx.index(".visible .entry") :]
    pattern = r"\.param (?:\.align \d+ )?\.(\w+)(?: \.ptr[^,\n]*)? \w+(\[\d+\])?"
    declared = re.findall(pattern, entry[: entry.index("{")])
    return [re.sub(r"^[bs](\d+)$", r"u\1", kind) + count for kind, count in declared]


def abi_gate(variant: Variant, ptx: str) -> None:
    """The generated C++ launcher passes exactly these parameters, in this order."""
    expected = [p for kind in variant.kernel.arguments.values() for p in passed_parameters(kind)]
    expected += SCRATCH_PARAMETERS
    found = ptx_parameters(ptx)
    # PTX writes a float parameter as .f32 or, like any 4-byte value, as .b32.
    same = len(expected) == len(found) and all(
        e == f or (e == "f32" and f == "u32") for e, f in zip(expected, found, strict=True)
    )
    if not same:
        raise GateError(f"{variant.stem}: PTX parameters {found}, the launcher passes {expected}")


def map_gate(variant: Variant, ptx: str, described: list[dict[str, Any]]) -> None:
    """The launcher encodes maps as the code expects them, and passes no extents and strides."""
    body = ptx[ptx.index("{", ptx.index(".visible .entry")) :]
    read = {int(n) for n in re.findall(r"_param_(\d+)\b", body)}
    maps = []
    position = 0
    for name, kind in variant.kernel.arguments.items():
        count = len(passed_parameters(kind))
        if isinstance(kind, (TensorMap, VectorMap)):
            maps.append((name, kind))
            if read & set(range(position + 1, position + count)):
                raise GateError(f"{variant.stem}: the code reads extents or strides of {name}")
        position += count
    for (name, kind), found in zip(maps, described, strict=True):
        if isinstance(kind, TensorMap):
            rows, heads, _ = (variant.constants[n] if isinstance(n, str) else n for n in kind.block)
            expected = ([rows, heads, 64], 3)  # 128-byte rows, swizzled over 128 bytes
        else:
            expected = ([kind.box], 0)
        if (list(found["block_size"]), found["swizzle"]) != expected:
            raise GateError(f"{variant.stem}: {name} is {found}, the launcher encodes {expected}")


def shared_memory_gate(variant: Variant, shared: int) -> None:
    if shared > variant.shared_limit:
        raise GateError(
            f"{variant.stem}: {shared} bytes of shared memory, its devices have "
            f"{variant.shared_limit}"
        )


def speed_gate(variant: Variant, log: str, cubin: bytes) -> None:
    """No message that ptxas serialised the products, no local memory in a loop of products."""
    if "Compiling entry function" not in log:
        raise GateError(f"{variant.stem}: no log of ptxas to read, got {log[:200]!r}")
    if serialised := serialised_products(log):
        raise GateError(f"{variant.stem}: ptxas serialised the products, {serialised[0]}")
    if "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log:
        return  # saves the disassembly, a quarter of the compile time
    listing = cuobjdump(cubin, "-sass")
    spills = spills_in_product_loops(listing, expect_loops=variant.head_dim > 0)
    if len(spills) > variant.kernel.loop_spills:
        raise GateError(
            f"{variant.stem}: {len(spills)} spills in a loop of products, the first {spills[0]}"
        )


def cuobjdump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True
        ).stdout


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes per thread; a stack means spills or run-time indexed arrays."""
    text = cuobjdump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise GateError(f"cuobjdump printed no resource usage: {text[:200]!r}")
    return {"registers": int(found[1]), "stack_bytes": int(found[2])}


def build(variant: Variant, out: Path) -> None:
    compiled, log = compile_variant(variant)
    ptx, cubin, metadata = compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata
    abi_gate(variant, ptx)
    map_gate(variant, ptx, metadata.tensordesc_meta or [])
    shared_memory_gate(variant, metadata.shared)
    speed_gate(variant, log, cubin)
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise GateError(f"{variant.stem}: needs scratch memory or clusters, the launcher has none")
    image = ptx.encode() + b"\0" if variant.ptx else cubin
    record = {
        "kernel": variant.kernel.name,
        "head_dim": variant.head_dim,
        "sm": variant.sm,
        "symbol": metadata.name,
        "tile": variant.tile,
        "threads": 32 * metadata.num_warps,
        "shared_bytes": metadata.shared,
        "ptx": variant.ptx,
        "bytes": len(image),
        "constants": variant.constants,
        **resource_usage(cubin),
    }
    (out / f"{variant.stem}.bin").write_bytes(image)
    (out / f"{variant.stem}.json").write_text(json.dumps(record, indent=1) + "\n")


def main(argv: list[str]) -> None:
    name, head_dim, out, *architectures = argv
    check_signature(kernel_named(name))
    with tempfile.TemporaryDirectory() as cache:  # never a stale image from a user's cache
        os.environ["TRITON_CACHE_DIR"] = cache
        for variant in unit_variants(name, int(head_dim), tuple(map(int, architectures))):
            build(variant, Path(out))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GateError as error:
        raise SystemExit(f"compile gate: {error}") from None
