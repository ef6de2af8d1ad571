"""The compile gates: loops of products found in SASS, spills inside them, ptxas's complaints."""

from __future__ import annotations

import pytest
from dflash_kernels.gates import (
    blocks_and_edges,
    parse,
    product_loops,
    serialised_products,
    spills_in_product_loops,
)
from triton_sources import compiling, needs_triton


def sass(*lines: str) -> str:
    """A listing of 16-byte instructions at 0x0, 0x10, ..., as cuobjdump prints one."""
    body = (
        f"        /*{16 * n:04x}*/                   {line} ;      /* 0x0000000000007918 */\n"
        "                                                       /* 0x000fc00000000000 */\n"
        for n, line in enumerate(lines)
    )
    return "\tcode for sm_90a\n\t\tFunction : kernel\n" + "".join(body) + "\t\t..........\n"


MMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"


def test_a_spill_counts_inside_the_loop_only() -> None:
    lines = [
        "STL [R1], R4",
        "MOV R2, R3",
        MMA,
        "LDL R4, [R1]",
        "@P0 BRA 0x10",
        "LDL.64 R4, [R1]",
        "EXIT",
    ]
    assert spills_in_product_loops(sass(*lines)) == ["LDL at 0x30"]
    lines[3] = "LDG.E R4, desc[UR4][R2.64]"
    assert spills_in_product_loops(sass(*lines)) == []


def test_a_loop_without_products_may_spill() -> None:
    assert spills_in_product_loops(sass("LDL R4, [R1]", "@!P1 BRA 0x0", MMA, "EXIT")) == []


def test_the_items_of_a_persistent_kernel_are_not_the_loop_that_counts() -> None:
    """Outer loop 0x00-0x60 spills around the inner loop of products 0x20-0x30, which does not."""
    lines = ["LDL R4, [R1]", MMA, MMA, "@P0 BRA 0x20", "STL [R1], R4", "NOP", "@P1 BRA 0x0", "EXIT"]
    assert spills_in_product_loops(sass(*lines)) == []
    lines[2] = "STL.128 [R1+0x10], R4"
    lines[3:4] = [MMA, "@P0 BRA 0x20"]
    lines[-2] = "@P1 BRA 0x0"
    assert spills_in_product_loops(sass(*lines)) == ["STL at 0x20"]


def test_a_wait_inside_the_loop_does_not_hide_it() -> None:
    """A spin on a barrier, placed behind the code and jumping back, belongs to the loop."""
    lines = [
        MMA,
        "@!P0 BRA 0x60",
        "LDL R4, [R1]",
        "@P1 BRA 0x0",
        "STL [R1], R4",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
        "@!P0 BRA 0x60",
        "BRA 0x20",
    ]
    listing = sass(*lines)
    assert spills_in_product_loops(listing) == ["LDL at 0x20"]
    blocks, edges = blocks_and_edges(parse(listing))
    products = {n for n, b in enumerate(blocks) if any("MMA" in i.opcode for i in b)}
    (loop,) = product_loops(range(len(blocks)), edges, products)
    inside = {i.address for n in loop for i in blocks[n]}
    assert inside == {0x00, 0x10, 0x20, 0x30, 0x60, 0x70, 0x80}


def test_two_loops_in_a_row_are_two() -> None:
    lines = [MMA, "@P0 BRA 0x0", MMA, "@P0 BRA 0x20", "EXIT"]
    blocks, edges = blocks_and_edges(parse(sass(*lines)))
    assert product_loops(range(len(blocks)), edges, {0, 1}) in ([{0}, {1}], [{1}, {0}])


def test_branches_on_operands_fall_through_too() -> None:
    code = parse(sass("BRA.U UP0, 0x20", "@P3 BRA 0x0", "BRA 0x20"))
    assert [i.conditional for i in code] == [True, True, False]
    _, edges = blocks_and_edges(code)
    assert edges == {0: {1, 2}, 1: {0, 2}, 2: {2}}


def test_other_spellings_of_a_product_count() -> None:
    for product in ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "UTCHMMA gdesc[UR4], gdesc[UR6], tmem"):
        listing = sass(product, "LDL R4, [R1]", "@P0 BRA 0x0", "EXIT")
        assert spills_in_product_loops(listing) == ["LDL at 0x10"]


def test_an_empty_listing_is_not_a_pass() -> None:
    with pytest.raises(ValueError, match="no instructions"):
        spills_in_product_loops("\tcode for sm_90a\n")
    with pytest.raises(ValueError, match="no loop"):
        spills_in_product_loops(sass(MMA, "EXIT"), expect_loops=True)


def test_ptxas_messages() -> None:
    message = (
        "ptxas info    : (C{}) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to {} in the function 'attention_fwd_kernel'\n"
    )
    quiet = "ptxas info    : Used 208 registers, used 1 barriers\n"
    log = quiet + message.format(7514, "ill formed pipeline stage") + message.format(7510, "a call")
    assert serialised_products(log) == ["C7514: ill formed pipeline stage", "C7510: a call"]
    assert serialised_products(quiet) == []


def refusal(script: str) -> str:
    done = compiling(script)
    assert done.returncode, done.stdout
    return done.stderr.splitlines()[-1]


BUILD = """
import dataclasses, pathlib, tempfile
from dflash_kernels import compile, variants
kernel = variants.kernel_named("{kernel}")
tile = kernel.choices[128] | dict({tile})
wide = dataclasses.replace(kernel, choices={{128: tile}})
compile.build([variants.Variant(wide, 128, 90)], pathlib.Path(tempfile.mkdtemp()))
"""


@needs_triton
def test_a_tile_that_spills_fails_the_build() -> None:
    last = refusal(BUILD.format(kernel="attention_tma_bwd_dkv", tile="EDGE=64"))
    assert "GateError: attention_tma_bwd_dkv_d128_sm90: " in last
    assert " spills in a loop of products, the first " in last


@needs_triton
def test_a_tile_whose_products_are_serialised_fails_the_build() -> None:
    last = refusal(BUILD.format(kernel="attention_bwd_dkv", tile="M=128"))
    assert "GateError: attention_bwd_dkv_d128_sm90: ptxas serialised the products, C75" in last


@needs_triton
def test_a_map_that_the_launcher_encodes_otherwise_fails_the_build() -> None:
    script = """
from dflash_kernels import compile, variants
variant = variants.Variant(variants.kernel_named("attention_tma_fwd"), 64, 90)
code = compile.compile_variant(variant)
ptx, maps = code.ptx, code.metadata.tensordesc_meta
compile.map_gate(variant, ptx, maps)                      # agrees as declared
try:
    compile.map_gate(variant, ptx.replace("param_1]", "param_6]"), maps)
except compile.GateError as error:
    assert str(error).endswith("the code reads extents or strides of k_ctx_map"), error
else:
    raise SystemExit("not refused")
compile.map_gate(variant, ptx, [dict(m, swizzle=0) for m in maps])
"""
    last = refusal(script)
    assert "GateError: attention_tma_fwd_d64_sm90: k_ctx_map is {" in last
    assert last.endswith("the launcher encodes ([64, 1, 64], 3)")


@needs_triton
def test_an_image_that_asks_for_nothing_early_fails_the_build() -> None:
    script = """
from dflash_kernels import compile, prefetch, variants
prefetch.COPY = "another.name"  # as another Triton may have it
compile.compile_variant(*variants.unit_variants("attention_tma_bwd_dq", 64, (90,)))
"""
    expected = "attention_tma_bwd_dq_d64_sm90: no another.name, so nothing was asked for early"
    assert refusal(script).endswith(expected)
