"""Copies of a loop's next tiles, moved from the end of a turn to where their slot is free."""

from __future__ import annotations

import re

import pytest
from triton_sources import compiling, skip_module_without_triton

skip_module_without_triton()

from dflash_kernels.prefetch import (  # noqa: E402
    ARRIVED,
    COPY,
    EXPECT,
    WAIT,
    UnknownLoop,
    copies_early,
)

PRODUCT = "ttng.warp_group_dot "
TURN = """\
      %phase = arith.xori %a, %one : i32
      ttng.wait_barrier %bar, %phase : i64
      %s = ttng.warp_group_dot %q, %k : f32
      %s_1:2 = ttng.warp_group_dot_wait %s, %q {pendings = 0 : i32} : f32
      %t = ttng.warp_group_dot %q_1, %k : f32
      %t_1:2 = ttng.warp_group_dot_wait %t, %q {pendings = 0 : i32} : f32
      %m = "tt.reduce"(%s_1#0) <{axis = 1 : i32}> ({
      ^bb0(%x: f32, %y: f32):
        %z = arith.maxnumf %x, %y : f32
        tt.reduce.return %z : f32
      }) : f32
      %n = arith.addi %i, %step : i32
      %slot = arith.addi %a, %one : i32
      %free = ttg.memdesc_index %slots[%slot] : !ttg.memdesc<2x64xbf16> -> !ttg.memdesc<64xbf16>
      ttng.barrier_expect %bar, 32768, %go : i64
      ttng.async_tma_copy_global_to_local %map[%n, %zero] %free, %bar, %go : f32
      %used = arith.addf %m, %t_1#0 : f32
      scf.yield %used, %slot : f32, i32"""


def module(turn: str) -> str:
    loop = "    %l:2 = scf.for %i = %lo to %hi step %step iter_args(%a = %b) -> (f32, i32) {"
    return f"tt.func @f() {{\n{loop}\n{turn}\n    }} {{tt.num_stages = 2 : i32}}\n  tt.return\n}}"


def moved(text: str, name: str, behind: str) -> str:
    """`text` with the line that has `name` put behind the line that has `behind`."""
    lines = text.split("\n")
    line = lines.pop(next(i for i, x in enumerate(lines) if name in x))
    lines.insert(next(i for i, x in enumerate(lines) if behind in x) + 1, line)
    return "\n".join(lines)


def test_copies_and_what_they_need_go_in_front_of_the_second_wait() -> None:
    lines = TURN.split("\n")
    expected = [*lines[:5], *lines[11:16], *lines[5:11], *lines[16:]]
    assert copies_early(module(TURN)) == module("\n".join(expected))


def test_behind_the_only_wait() -> None:
    lines = [x for x in TURN.split("\n") if "%t" not in x]
    expected = [*lines[:4], *lines[9:14], *lines[4:9], *lines[14:]]
    assert copies_early(module("\n".join(lines))) == module("\n".join(expected))


def test_a_loop_without_copies_stays() -> None:
    plain = module("\n".join(x for x in TURN.split("\n") if COPY not in x and EXPECT not in x))
    early = copies_early(module(TURN))
    assert copies_early(plain + module(TURN)) == plain + early


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (TURN.replace("pendings = 0", "pendings = 1", 1), "does not first wait for every product"),
        ("\n".join(x for x in TURN.split("\n") if WAIT not in x), "does not first wait"),
        (moved(TURN, COPY, "%phase ="), "copies before its waits"),
        (TURN.replace("%n = arith.addi %i", "%n = tt.load %i"), "depend on %n = tt.load"),
        (TURN.replace("[%n, %zero]", "[%m, %zero]"), 'depend on %m = "tt.reduce"'),
        (moved(TURN, ARRIVED, "%slot ="), "waits for copies of its own turn"),
        (TURN.replace("<2x64", "<1x64"), "into the slot that it reads"),
        (TURN.replace("] %free,", "] %only,"), "into the slot that it reads"),
        ("\n".join(x for x in TURN.split("\n") if COPY not in x), "no innermost loop copies"),
    ],
    ids=[
        "other products in flight",
        "no wait",
        "copied early",
        "a load",
        "a product",
        "read late",
        "one slot",
        "one slot, not indexed",
        "none",
    ],
)
def test_another_form_is_refused(turn: str, message: str) -> None:
    with pytest.raises(UnknownLoop, match=re.escape(message)):
        copies_early(module(turn))


@pytest.mark.parametrize(
    ("kernel", "head_dim", "waits"),
    [("attention_tma_bwd_dq", 64, 2), ("attention_tma_bwd_dv", 256, 1)],
)
def test_compiled_kernels_have_their_copies_early(kernel: str, head_dim: int, waits: int) -> None:
    """By the build's own step: the same operations, in another order."""
    script = f"""
from dflash_kernels import compile, prefetch
from dflash_kernels.variants import unit_variants
early = prefetch.copies_early
def printing(text):
    print(text, early(text), sep="\\0", end="\\0", file=sys.__stdout__)
    return early(text)
prefetch.copies_early = printing
compile.compile_variant(*unit_variants("{kernel}", {head_dim}, (90,)))
"""
    done = compiling("import sys" + script)
    assert done.returncode == 0, done.stderr
    before, after, _ = (text.split("\n") for text in done.stdout.split("\0"))
    assert sorted(before) == sorted(after)
    loop = [i for i, x in enumerate(after) if " scf.for " in x][-1]
    turn = after[loop : [i for i, x in enumerate(after) if "scf.yield" in x][-1]]
    products = [i for i, x in enumerate(turn) if PRODUCT in x]
    waited = [i for i, x in enumerate(turn) if WAIT in x]
    copies = [i for i, x in enumerate(turn) if COPY in x]
    assert (len(copies), len(waited)) == (2, waits)
    behind = waited[1] if waits == 2 else products[-1]
    assert waited[0] < copies[0] < copies[1] < behind
