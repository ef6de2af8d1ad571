"""The vocabulary loss's kernels: one for each dtype of the logits, and what their tiles follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_kernels import soft_labels, vocabulary
from dflash_kernels.spec import Argument, Kernel, pointers


def _per_row(names: str, kind: str) -> dict[str, Argument]:
    """One value of each row. Slices of longer tensors, so nothing is promised of their address."""
    return {f"{name}_ptr": f"{kind}*any" for name in names.split()}


_SIZES: dict[str, Argument] = {"row_stride": "stride", "V": "i32"}

# 16 bytes a load and thread, four loads a tile, two tiles on their way while a third is reduced.
_STATISTICS = Kernel(
    name="vocabulary_statistics_f32",
    fn=vocabulary.vocabulary_statistics_kernel,
    arguments=pointers("logits", "f32*")
    | _per_row("labels", "i64")
    | _per_row("lse at_label", "f32")
    | _per_row("prediction rank", "i64")
    | _SIZES,
    grid="num_rows",
    tile="C",
    choices={0: dict(C=1024, U=4, STAGES=3, num_warps=8)},
    extra_host={"num_rows": "i32"},
)
_GRADIENT = Kernel(
    name="vocabulary_gradient_f32",
    fn=vocabulary.vocabulary_gradient_kernel,
    arguments=pointers("logits", "f32*")
    | pointers("grad", "bf16*")
    | _per_row("labels", "i64")
    | _per_row("lse at_label weights", "f32")
    | _SIZES,
    grid="num_rows",
    tile="TILE",
    choices={0: dict(TILE=4096, num_warps=8)},
    extra_host={"num_rows": "i32"},
)


def _of_bf16(kernel: Kernel, **choices: int) -> Kernel:
    return replace(
        kernel,
        name=kernel.name.replace("f32", "bf16"),
        arguments=kernel.arguments | pointers("logits", "bf16*"),
        choices={0: kernel.choices[0] | choices},
    )


def _against_target(name: str, fn: Any) -> Kernel:
    """Both sides' logits, so half a tile of each has a tile's bytes on their way."""
    return Kernel(
        name=name,
        fn=fn,
        arguments=pointers("logits teacher", "f32*")
        | pointers("grad", "bf16*")
        | _per_row("lse teacher_lse weights loss", "f32")
        | _SIZES,
        grid="num_rows",
        tile="TILE",
        choices={0: dict(TILE=2048, num_warps=8)},
        extra_host={"num_rows": "i32"},
    )


VOCABULARY_KERNELS = (
    _STATISTICS,
    _of_bf16(_STATISTICS, C=1024, U=4, num_warps=4),
    _GRADIENT,
    _of_bf16(_GRADIENT),
    _against_target("vocabulary_kl", soft_labels.vocabulary_kl_kernel),
    _against_target("vocabulary_lk", soft_labels.vocabulary_lk_kernel),
)
