"""Types of the compiled module (csrc/bindings.cpp). Addresses, strides and streams are integers."""

from collections.abc import Sequence
from typing import Protocol

KEY_TILE: int

class CpuShape:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_ctx: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        window: int,
        causal: bool,
        scale: float,
        bf16: bool,
    ) -> None: ...

def attention_cpu_forward(
    shape: CpuShape,
    inputs: Sequence[int],
    strides: Sequence[int],
    ctx_start: int,
    ctx_end: int,
    out: int,
    lse: int,
    threads: int,
) -> None: ...
def attention_cpu_backward(
    shape: CpuShape,
    inputs: Sequence[int],
    strides: Sequence[int],
    ctx_start: int,
    ctx_end: int,
    out: int,
    grad_out: int,
    lse: int,
    grads: Sequence[int],
    threads: int,
) -> None: ...
def cpu_instruction_set() -> str: ...

class _Launcher(Protocol):
    """Generated from python/dflash_kernels/variants.py, which lists each kernel's arguments."""

    def __call__(self, *, device: int, stream: int, head_dim: int, **arguments: float) -> None: ...

attention_fwd: _Launcher
attention_bwd_dq: _Launcher
attention_bwd_dkv: _Launcher
attention_bwd_own: _Launcher
attention_tma_fwd: _Launcher
attention_tma_bwd_dq: _Launcher
attention_tma_bwd_dkv: _Launcher
attention_tma_bwd_dk: _Launcher
attention_tma_bwd_dv: _Launcher
attention_tma_bwd_own: _Launcher
attention_layout: _Launcher
hopper_bwd_dkv: _Launcher
attention_bwd_delta: _Launcher
attention_bwd_delta_pairs: _Launcher
attention_tma_bwd_dkv_keep: _Launcher
attention_tma_bwd_own_keep: _Launcher
hopper_bwd_dkv_keep: _Launcher
attention_bwd_dq_kept: _Launcher
quantise_rows: _Launcher
swiglu_fwd: _Launcher
swiglu_bwd: _Launcher
head_norm_rope_fwd: _Launcher
head_norm_rope_bwd: _Launcher

# rms_norm_fwd_4096, rms_norm_bwd_8192, ..., hopper_fwd_own16, _own32, _own64,
# hopper_bwd_dq_own16, ..., vocabulary_statistics_f32, _bf16, vocabulary_gradient_f32, _bf16,
# vocabulary_kl and vocabulary_lk have the same form.
def warmup(device: int) -> None: ...
def describe_device(device: int) -> str: ...
def device_images(device: int) -> tuple[int, bool]: ...
def choose_image(sm: int) -> tuple[int, bool]: ...
def driver_error() -> str: ...
def built_architectures() -> list[int]: ...
def build_report() -> str: ...
