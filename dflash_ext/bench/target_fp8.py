"""FP8 beside bf16 for `bench target`: tokens/s in the same rounds, and how far the taps drift.

Three models with the same weights: ours in bf16, ours with its products in FP8, and, where it fits
beside them, transformers' own in fp32, the truth for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.bench import anchors
from dflash_ext.bench.markdown import Row
from dflash_ext.bench.target_problem import SHAPES, Case, Shape, random_target
from dflash_ext.bench.timing import medians, tidy, timer
from dflash_ext.target import Target

FITS_IN_FP32 = {"tiny-qwen3", "qwen3-8b"}
"""Of the shapes on a GPU: beside their two other copies, in the 139 GiB of an H200."""
DRIFT_LENGTHS = (1024, 512, 300, 150, 60)


def copy_of(target: Target, shape: Shape, dtype: torch.dtype, *, accelerated: bool) -> Target:
    """The same weights in another model, in this dtype."""
    other = random_target(shape, str(target.device), dtype, accelerated=accelerated)
    other.model.load_state_dict(target.model.state_dict())
    return other


def tap_errors(target: Target, states: Tensor, truth: Tensor) -> list[float]:
    """Relative error of each tap, of features [T, K*Ht] and the true ones."""
    width = target.hidden_size
    pairs = zip(states.float().split(width, 1), truth.float().split(width, 1))
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


def drift(ours: Target, quantised: Target, exact: Target) -> list[Row]:
    """Of each tap its error in bf16 and in FP8, against fp32 from the same weights."""
    batch = PackedBatch.random(DRIFT_LENGTHS, ours.model.config.get_text_config().vocab_size)
    truth = exact.features(batch).features
    bf16, fp8 = (tap_errors(x, x.features(batch).features, truth) for x in (ours, quantised))
    return [
        tidy({"tap": tap, "bf16": a, "fp8": b, "fp8_over_bf16": b / a})
        for tap, a, b in zip(ours.handed_taps, bf16, fp8)
    ]


def speeds(ours: Target, quantised: Target, case: Case, device: str, rounds: int) -> Row:
    """tokens/s of both on one batch, over interleaved rounds."""
    vocab = ours.model.config.get_text_config().vocab_size
    batch = PackedBatch.random(case.documents, vocab)
    timers = {
        name: timer(lambda target=target: target.features(batch), device)  # type: ignore[misc]
        for name, target in (("ours", ours), ("fp8", quantised))
    }
    times = medians(timers | {"product": anchors.timed_products(device)}, rounds)
    row: Row = {"case": case.name, "tokens": batch.num_tokens}
    row |= {f"{name}_ms": ms for name, ms in times.items()}
    row |= {f"{name}_ktok_s": batch.num_tokens / times[name] for name in ("ours", "fp8")}
    return tidy(row | {"fp8_over_ours": times["ours"] / times["fp8"]})


def measure_fp8(ours: Target, name: str, cases: tuple[Case, ...], device: str, rounds: int) -> Row:
    """`ours`: the target of this shape in bf16, accelerated; copies of it are made beside it."""
    shape, taps = SHAPES[name], list[Row]()
    quantised = copy_of(ours, shape, torch.bfloat16, accelerated=True)
    quantised.quantise()
    if name in FITS_IN_FP32:
        taps = drift(ours, quantised, copy_of(ours, shape, torch.float32, accelerated=False))
    return {
        "taps": taps,
        "rows": [speeds(ours, quantised, case, device, rounds) for case in cases],
    }
