"""Attention problems shared by the interpreter and GPU tests: layouts that exercise every path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ext.ops.attention import dflash_attention_reference
from dflash_ext.ops.layout import AttentionLayout, build_layout


@dataclass(frozen=True)
class Case:
    name: str
    documents: tuple[int, ...]
    """Token counts; the first is followed directly by the next in the packed context."""
    anchors: tuple[int, ...]
    """Packed positions, sorted."""
    B: int = 4
    Hkv: int = 1
    G: int = 2
    D: int = 64
    window: int | None = None
    causal: bool = False
    padding: int = 0

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("one_document", (70,), (1, 17, 40, 41, 69)),
    Case("empty_context_first_token", (33,), (0, 5, 32)),
    Case("documents", (20, 7, 50), (3, 12, 20, 24, 30, 60, 76), G=3, Hkv=2),
    Case("tiny_documents", (1, 2, 3, 1, 5), (0, 1, 3, 8), B=4, G=1),
    Case("block16_gqa5", (90,), (2, 50, 88), B=16, G=5),
    Case("block32_gqa16", (33,), (15, 32), B=32, G=16),
    Case("block8_no_gqa", (64, 64), (7, 63, 64, 100, 127), B=8, G=1, Hkv=3),
    Case("window", (100, 40), (5, 33, 64, 99, 103, 139), window=24),
    Case("window_causal", (100,), (5, 33, 64, 99), B=8, window=24, causal=True),
    Case("window_smaller_than_block", (60,), (9, 30, 59), B=16, window=5, causal=True),
    Case("causal", (50,), (0, 13, 49), B=8, causal=True),
    Case("padding_blocks", (40, 20), (3, 39, 45), padding=3),
    Case("padding_of_large_blocks", (60, 30), (3, 9, 41, 59, 70, 88), B=16, G=4, padding=3),
    Case("groups_of_heads", (90, 7), (5, 33, 64, 95), B=16, G=6, Hkv=2),
    Case("only_padding", (12,), (), padding=2),
    Case("no_context", (), (), padding=1),
    Case("tail_that_nobody_sees", (200,), (5, 33, 60)),
    Case("documents_that_nobody_sees", (50, 150, 40, 90), (20, 44, 210, 239)),
    Case("head_dim_128", (40,), (11, 35), B=8, G=4, D=128),
    Case("tokens", (13, 1, 8), tuple(range(22)), B=1, G=4),
    Case("tokens_window", (21, 7), tuple(range(28)), B=1, G=3, window=9),
)


def case_layout(case: Case, device: str = "cpu") -> AttentionLayout:
    T = sum(case.documents)
    starts = torch.tensor([0, *case.documents]).cumsum(0)
    anchors = torch.tensor(case.anchors, dtype=torch.int64)
    doc = torch.searchsorted(starts, anchors, right=True) - 1
    pad = torch.ones(case.padding, dtype=torch.int64)
    return build_layout(
        torch.cat([starts[doc], pad * (T + 1)]).to(device),
        torch.cat([anchors, pad * T]).to(device),
        num_ctx=T,
        block_size=case.B,
        window=case.window,
        causal=case.causal,
        visible_rows=int((anchors - starts[doc]).sum()),
    )


def make_inputs(
    case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[tuple[Tensor, ...], AttentionLayout, Tensor]:
    """(q, k_ctx, v_ctx, k_blk, v_blk), layout, grad_out; fresh random numbers for every seed."""
    layout = case_layout(case, device)
    g = torch.Generator().manual_seed(seed)
    rows, T, Hq = layout.num_blocks * case.B, layout.num_ctx, case.Hkv * case.G

    def random(r: int, h: int) -> Tensor:
        return torch.randn(r, h, case.D, generator=g).to(device=device, dtype=dtype)

    t = (
        random(rows, Hq),
        random(T, case.Hkv),
        random(T, case.Hkv),
        random(rows, case.Hkv),
        random(rows, case.Hkv),
    )
    return t, layout, random(rows, Hq)


def reference_gradients(
    t: tuple[Tensor, ...], layout: AttentionLayout, dout: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output and five gradients of the naive reference, computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in t]
    out = dflash_attention_reference(*leaves, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]
