"""Compile one kernel at one head_dim for every architecture, with no GPU, driver, torch or nvcc.

    python -m dflash_kernels.compile KERNEL HEAD_DIM OUT_DIR SM [SM ...]

Writes OUT_DIR/<stem>.bin (a cubin, or the text of the fallback PTX) and <stem>.json (what the
launcher and the report need) per variant. Fails, naming the variant, when the image would
not run (too much shared memory, parameters other than the C++ launcher will pass) or would run far
below its tile's speed (serialised matrix products, spills in a loop of products: gates.py).
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # byte-reproducible images, 2-4x smaller
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # printed by Triton; `compile_variant` catches it
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # an image from the cache comes without that log

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.cache import triton_key

from dflash_kernels import prefetch
from dflash_kernels.gates import serialised_products, spills_in_product_loops
from dflash_kernels.spec import TYPES, Argument, Computed, TensorMap, VectorMap, check_signature
from dflash_kernels.variants import SHARED_MEMORY_LIMIT, Variant, kernel_named, unit_variants

triton.knobs.runtime.add_stages_inspection_hook = prefetch.add_to_stages

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Appended by Triton to every kernel: global and profile scratch, both unused here.
SCRATCH_PARAMETERS = ["u64", "u64"]


class GateError(RuntimeError):
    """The compiled image must not be shipped."""


def frontend(variant: Variant) -> ASTSource:
    """The kernel's Python as Triton wants to be given it."""
    kernel = variant.kernel
    constants = {n: v for n, v in variant.constants.items() if n != "num_warps"}
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
    source = GluonASTSource if kernel.fn.is_gluon() else ASTSource
    return source(kernel.fn, signature, constants, promises)


@dataclass(frozen=True)
class Code:
    """What Triton makes of one variant: PTX, its description, the cubin and ptxas's log."""

    ttir: str
    """Triton's representation before any architecture is known; "" from Gluon, which has none."""
    ptx: str
    metadata: Any
    cubin: bytes
    log: str


def compile_variant(variant: Variant, ttir: str = "") -> Code:
    """Through all of Triton, or from `ttir` of a variant with the same constants on."""
    log = io.StringIO()
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file, contextlib.redirect_stdout(log):
        file.write(ttir)
        file.flush()
        try:
            compiled = triton.compile(
                file.name if ttir else frontend(variant),
                target=GPUTarget("cuda", variant.sm, 32),
                options={"num_warps": variant.constants["num_warps"], "enable_fp_fusion": True},
            )
        except prefetch.UnknownLoop as error:
            raise GateError(f"{variant.stem}: {error}") from None
    asm = compiled.asm
    if variant.constants.get("TMA") and prefetch.COPY not in asm["ttgir"]:
        raise GateError(f"{variant.stem}: no {prefetch.COPY}, so nothing was asked for early")
    return Code(asm.get("ttir", ""), asm["ptx"], compiled.metadata, asm["cubin"], log.getvalue())


def assemble(code: Code, sm: int) -> Code:
    """The same PTX for another architecture of its family, by Triton's own call of ptxas."""
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    options = backend.parse_options({"enable_fp_fusion": True})
    ptx = re.sub(r"\.target sm_\d+", f".target sm_{sm}", code.ptx)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        cubin = backend.make_cubin(ptx, {}, options, sm)
    return replace(code, ptx=ptx, cubin=cubin, log=log.getvalue())


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


@functools.cache  # the fallback PTX has often been assembled as the image of sm_80
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


def build(made: list[Variant], out: Path) -> None:
    """One compile job. What Triton need not do twice for its variants it does once.

    All that is known before an architecture is, is the same for equal constants (TTIR); all of
    sm_8x takes the same PTX, and the fallback is that PTX.
    """
    ttir: dict[str, str] = {}
    codes: dict[tuple[str, int], Code] = {}
    for variant in made:
        constants = repr(variant.constants)
        known = [c for (k, sm), c in codes.items() if k == constants and same_ptx(sm, variant.sm)]
        if (constants, variant.sm) not in codes:
            codes[constants, variant.sm] = (
                assemble(known[0], variant.sm)
                if known
                else compile_variant(variant, ttir.get(constants, ""))
            )
        code = codes[constants, variant.sm]
        ttir.setdefault(constants, code.ttir)
        write(variant, code, out)


def same_ptx(sm: int, other: int) -> bool:
    """sm_80 to 89 differ in nothing that these kernels use, so only ptxas need tell them apart."""
    return sm // 10 == other // 10 == 8


def write(variant: Variant, code: Code, out: Path) -> None:
    """Through the gates, then the image and its record into `out`."""
    metadata = code.metadata
    abi_gate(variant, code.ptx)
    map_gate(variant, code.ptx, metadata.tensordesc_meta or [])
    shared_memory_gate(variant, metadata.shared)
    speed_gate(variant, code.log, code.cubin)
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise GateError(f"{variant.stem}: needs scratch memory or clusters, the launcher has none")
    image = code.ptx.encode() + b"\0" if variant.ptx else code.cubin
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
        **resource_usage(code.cubin),
    }
    (out / f"{variant.stem}.bin").write_bytes(image)
    (out / f"{variant.stem}.json").write_text(json.dumps(record, indent=1) + "\n")


def warm() -> None:
    """Works out what Triton remembers for a process's later compilations and for its forks."""
    triton_key()
    for sm in SHARED_MEMORY_LIMIT:
        backend = make_backend(GPUTarget("cuda", sm, 32))
        backend.hash()
        backend.parse_options({}).hash()


def main(argv: list[str]) -> None:
    name, head_dim, out, *architectures = argv
    check_signature(kernel_named(name))
    with tempfile.TemporaryDirectory() as cache:  # never a stale image from a user's cache
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            build(unit_variants(name, int(head_dim), tuple(map(int, architectures))), Path(out))
        except GateError as error:
            raise SystemExit(f"compile gate: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
