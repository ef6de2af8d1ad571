"""The row-wise operators down to the driver: image, grid, and every parameter of their launches."""

from __future__ import annotations

from pathlib import Path

from stub_driver import build_stubs, result, run

ROW_WISE = """
import torch
from dflash_ext.ops import norm, quantise, rotary, rows, swiglu
rows.has_kernels = lambda x: x.dtype == torch.bfloat16          # as if these tensors were on CUDA
rows.place = lambda x, head_dim=0: dict(device=1, stream=77, head_dim=head_dim)
rows.resident_programs = lambda x, per_multiprocessor: 132 * per_multiprocessor
wide = torch.zeros(300, 3 * 4864, dtype=torch.bfloat16)
a, b, c = wide.split(4864, dim=1)
weight, few = torch.ones(4864), torch.ones(1000, 4096, dtype=torch.bfloat16)
heads = wide[:, :3072].view(300, 24, 128)[:, 2:18]
tables = rotary.rope_tables(torch.arange(300), 128, 1e4)
low = lambda x: (x if isinstance(x, int) else x.data_ptr()) & 0xFFFFFFFF
def seen(call, *expected):
    stub.stub_expect_params(len(expected)); call(); r = last()
    got = [p & 0xFFFFFFFF for p in r.params][:len(expected)]
    symbol = stub.stub_load(r.load).contents.symbol.decode()
    return dict(symbol=symbol, grid=r.grid, stream=r.stream, context=r.context, got=got,
                expected=[low(x) for x in expected], block=r.block)
W = 3 * 4864
print(json.dumps([
    seen(lambda: norm.rms_norm_forward(a, weight, 0.5, out=b), a, a, weight, b, b, W, W, W, W, 4864, 0, 0x3F000000),
    seen(lambda: norm.add_rms_norm_forward(a, b, weight, 0.5, out=c, total=b), a, b, weight, c, b, W, W, W, W, 4864, 1),
    seen(lambda: norm.rms_norm_backward(few, torch.ones(4096), 0.5, few, dx=few), few),
    seen(lambda: norm.rms_norm_backward(a, weight, 0.5, b, grad_total=c, dx=c, normed=a), a, weight, b, c, c, a),
    seen(lambda: swiglu.swiglu_forward(a, b, out=c), a, b, c, W, W, W, 4864),
    seen(lambda: swiglu.swiglu_backward(a, b, c, dgate=a, dup=b), a, b, c, a, b, a, W, W, W, W, W, W, 4864, 0),
    seen(lambda: swiglu.swiglu_backward(a, b, c, dgate=a, dup=b, act=c), a, b, c, a, b, c, W, W, W, W, W, W, 4864, 1),
    seen(lambda: rotary.head_norm_rope_forward(heads, weight[:128], tables, 0.5, out=heads),
         heads, weight, tables.cos, tables.sin, heads, W, 128, W, 128, 64, 300, 16, 8, 1, 0x3F000000),
    seen(lambda: rotary.head_rope_forward(heads, tables, out=heads),
         heads, tables.cos, tables.cos, tables.sin, heads, W, 128, W, 128, 64, 300, 16, 8, 0, 0x3F800000),
    seen(lambda: quantise.quantise_rows(a, b), a, b),
    seen(lambda: quantise.quantise_rows(few), few, few),
    seen(lambda: rotary.head_norm_rope_backward(heads, weight[:128], tables, 0.5, heads, dx=heads),
         heads, weight, tables.cos, tables.sin, heads, heads),
]))
"""


def test_row_wise_operators_launch_on_slices(tmp_path: Path) -> None:
    calls = result(run(build_stubs(tmp_path)["plain"], ROW_WISE))
    for call in calls:
        assert call["got"] == call["expected"], call["symbol"]
        assert (call["stream"], call["context"]) == (77, 1001)
    assert [(c["symbol"].removesuffix("_kernel"), c["grid"], c["block"]) for c in calls] == [
        ("rms_norm_fwd", 300, 256),
        ("rms_norm_fwd", 300, 256),
        ("rms_norm_bwd", 2 * 132, 256),  # two programs a multiprocessor
        ("rms_norm_bwd", 132, 512),  # rows of up to 8,192: one
        ("swiglu_fwd", 300 * 3, 128),  # tiles of 2,048 columns
        ("swiglu_bwd", 300 * 3, 128),
        ("swiglu_bwd", 300 * 3, 128),
        ("head_norm_rope_fwd", 19 * 2, 128),  # 16 rows of 8 heads a program
        ("head_norm_rope_fwd", 19 * 2, 128),
        ("quantise_rows", 300, 128),
        ("quantise_rows", 1000, 128),
        ("head_norm_rope_bwd", 300, 128),
    ]
