"""The kernels' contract: one file per operator, CPU and CUDA behind the same function."""

from dflash_ext.ops.attention import dflash_attention, dflash_attention_reference
from dflash_ext.ops.layout import AttentionLayout, build_layout

__all__ = ["AttentionLayout", "build_layout", "dflash_attention", "dflash_attention_reference"]
