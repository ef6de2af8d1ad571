"""What the operator is measured against in the same run; torch.compile and flex only here.

Each function returns contestants that have been set up and run; `NAME fwd` and `NAME bwd`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_ext.bench.problem import Problem, gradient_run
from dflash_ext.bench.timing import Run, timer
from dflash_ext.ops.attention import dflash_attention, visible_pairs
from dflash_ext.ops.attention_call import Tensors
from dflash_ext.ops.layout import AttentionLayout

PRODUCT = 8192
CPU_PRODUCT = 1024
# Of one burst: 0.15 s on an H200, as long as a step, so that the power limit holds there too.
PRODUCTS, CPU_PRODUCTS = 100, 10
CUDNN_HEADS, CUDNN_DIM = 32, 128
CUDNN_LENGTHS = (4096, 16384)
LARGEST_DIFFERENCE = 0.02  # each is within 0.003 of the truth in bf16


class WrongResult(RuntimeError):
    """Ours and an anchor compute different things: nothing measured is worth reporting."""


def product_run(device: str) -> Run:
    """The ceiling: one square matrix product, bf16 on CUDA and fp32 on the CPU."""
    n, dtype = (PRODUCT, torch.bfloat16) if device == "cuda" else (CPU_PRODUCT, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def product_flops(device: str) -> int:
    return 2 * (PRODUCT if device == "cuda" else CPU_PRODUCT) ** 3


def timed_products(device: str) -> Callable[[], float]:
    """A run of a burst of those products: ms of one."""
    product, count = product_run(device), PRODUCTS if device == "cuda" else CPU_PRODUCTS

    def burst() -> None:
        for _ in range(count):
            product()

    timed = timer(burst, device)
    return lambda: timed() / count


def cudnn_flops(length: int) -> int:
    """Forward FLOPs of dense causal attention over one sequence of `length`."""
    return 4 * CUDNN_HEADS * CUDNN_DIM * length * length // 2


def cudnn_runs(length: int) -> dict[str, Run]:
    """cuDNN's dense causal attention, 32 heads, D 128, bf16."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.randn(
            1, CUDNN_HEADS, length, CUDNN_DIM, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(3)
    )

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    name = f"cudnn {length}"
    return {f"{name} fwd": forward, f"{name} bwd": gradient_run(forward(), (q, k, v))}


def joined(leaves: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as other operators want them, [1, heads, rows, D]: context and blocks as one."""
    k, v = (torch.cat([leaves[i], leaves[i + 2]]) for i in (1, 2))
    q, k, v = (x.transpose(0, 1)[None] for x in (leaves.q, k, v))
    return q, k, v


def sdpa_runs(problem: Problem, layout: AttentionLayout) -> dict[str, Run]:
    """scaled_dot_product_attention with the dense mask; joining k and v is part of its work."""
    mask = visible_pairs(layout)

    def forward() -> Tensor:
        q, k, v = joined(problem.leaves)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return {"sdpa fwd": forward, "sdpa bwd": gradient_run(forward(), problem.leaves)}


Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _own_key(q: Tensor, kv: Tensor, B: int, T: int) -> Tensor:
    """Whether kv, behind T context rows, is of the query's own block."""
    return (kv >= T) & ((kv - T) // B == q // B)


def flex_visible(layout: AttentionLayout) -> Mask:
    """The mask of a layout without window or causality, as flex_attention wants it."""
    B, T = layout.block_size, layout.num_ctx
    start, end = layout.ctx_start.long(), layout.ctx_end.long()

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // B
        return ((kv >= start[block]) & (kv < end[block])) | _own_key(q, kv, B, T)

    return visible


def flex_by_document(problem: Problem) -> Mask:
    """The same mask from numbers of documents, as trainers write it; floors were taken with it."""
    B, T = problem.shape.B, problem.shape.T
    anchors = problem.ctx_end.long()
    lengths = torch.tensor(problem.shape.documents, device=anchors.device)
    document = torch.arange(len(lengths), device=anchors.device).repeat_interleave(lengths)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor = anchors[q // B]
        same = document[kv.clamp(max=T - 1)] == document[anchor]
        return ((kv < T) & (kv < anchor) & same) | _own_key(q, kv, B, T)

    return visible


def flex_runs(
    name: str, visible: Mask, problem: Problem, layout: AttentionLayout
) -> tuple[dict[str, Run], dict[str, float]]:
    """Compiled flex_attention on the same mask, and what it costs before it runs.

    Second value: `flex_first_s`, the first forward and backward (compilation); `flex_mask_ms`, its
    mask built without compilation; `flex_difference`, the largest relative norm of our output and
    dq minus flex's. Raises WrongResult if they differ by more than bf16 explains.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = problem.leaves.q.shape[0]
    flex = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.detach().contiguous().requires_grad_() for x in joined(problem.leaves))
    mask_seconds = []
    for _ in range(4):  # the first one warms up
        torch.cuda.synchronize()
        started = time.perf_counter()
        mask = create_block_mask(visible, None, None, rows, layout.num_ctx + rows, device="cuda")
        torch.cuda.synchronize()
        mask_seconds.append(time.perf_counter() - started)

    def forward() -> Tensor:
        return flex(q, k, v, block_mask=mask, enable_gqa=True)

    started = time.perf_counter()
    out = forward()
    backward = gradient_run(out, (q, k, v))
    backward()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    difference = _difference(problem, layout, out, q)
    if not difference < LARGEST_DIFFERENCE:
        raise WrongResult(f"our attention and flex differ by {difference:.3g}")
    return {f"{name} fwd": forward, f"{name} bwd": backward}, {
        "flex_first_s": first,
        "flex_mask_ms": statistics.median(mask_seconds[1:]) * 1e3,
        "flex_difference": difference,
    }


def _difference(problem: Problem, layout: AttentionLayout, out: Tensor, q: Tensor) -> float:
    grad = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, grad, retain_graph=True)
    ours = dflash_attention(*problem.leaves, layout)
    (our_dq,) = torch.autograd.grad(ours, problem.leaves.q, grad[0].transpose(0, 1))
    pairs = ((ours, out[0].transpose(0, 1)), (our_dq, dq[0].transpose(0, 1)))
    return max(float((x - y).detach().float().norm() / y.detach().float().norm()) for x, y in pairs)
