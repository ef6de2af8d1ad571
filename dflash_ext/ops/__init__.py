"""The kernels' contract: one file per operator, CPU and CUDA behind the same function."""

from dflash_ext.ops.attention import dflash_attention, dflash_attention_reference
from dflash_ext.ops.layout import AttentionLayout, build_layout
from dflash_ext.ops.norm import add_rms_norm, rms_norm
from dflash_ext.ops.rotary import RopeTables, head_norm_rope, rope_tables
from dflash_ext.ops.swiglu import swiglu

__all__ = [
    "AttentionLayout",
    "RopeTables",
    "add_rms_norm",
    "build_layout",
    "dflash_attention",
    "dflash_attention_reference",
    "head_norm_rope",
    "rms_norm",
    "rope_tables",
    "swiglu",
]
