"""`python -m dflash_ext.bench target`: a frozen target's forward beside plain transformers.

One model with random weights, cut behind its last tap, run in three ways by the same
`Target.features`, in interleaved rounds: packed with fused layers (ours); packed with transformers'
own layers; and as plain transformers with SDPA runs it, padded, documents of similar length
together. Before anything is timed the taps of all three must agree, and every layer of ours must be
fused. Useful operations are 2 for every weight a token passes and 4 D for every query head and
visible pair (`rates.TargetCost`), so padding does not count; the rate of the 8192^3 product comes
from the same rounds. On a GPU also: peak memory over weights and output, and where the time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from dflash_ext.acceleration import TOLERANCE, Acceleration, document_errors
from dflash_ext.batch import PackedBatch
from dflash_ext.bench import anchors
from dflash_ext.bench.command import keep, parsed, parser_of
from dflash_ext.bench.footprint import gib, peak_of
from dflash_ext.bench.kernel_kinds import kinds_of, line
from dflash_ext.bench.markdown import Row
from dflash_ext.bench.target_fp8 import measure_fp8
from dflash_ext.bench.target_problem import (
    CPU_SHAPES,
    CUDA_SHAPES,
    SHAPES,
    Case,
    cases,
    random_target,
)
from dflash_ext.bench.timing import medians, tidy, timer
from dflash_ext.rates import TargetCost
from dflash_ext.startup import release
from dflash_ext.target import Target
from dflash_ext.target_loading import decoder_layers

OURS, OWN_LAYERS, PLAIN = "ours", "own_layers", "plain"
WAYS = (OURS, OWN_LAYERS, PLAIN)


class NotAccelerated(RuntimeError):
    """Ours would be measured without what makes it ours."""


class Ways:
    """One target in memory, run in any of WAYS; changing costs nothing while it is timed."""

    def __init__(self, target: Target) -> None:
        """Raises NotAccelerated unless every layer of the target is fused."""
        fused = 0 if target.acceleration is None else len(target.acceleration.fused_layers)
        if fused != target.num_layers:
            how = "padded" if target.acceleration is None else "packed"
            raise NotAccelerated(
                f"{type(target.model).__name__}: {fused} of {target.num_layers} layers are fused, "
                f"its forward is {how}; the log says why"
            )
        self.target = target
        self._layers = decoder_layers(target.model, target.num_layers)
        self._config = target.model.config.get_text_config()

    def use(self, way: str) -> None:
        """From now on `target.features` runs this way."""
        target = self.target
        if target.acceleration is not None:
            target.acceleration.remove()
            target.acceleration = None
        if way != PLAIN:
            target.acceleration = Acceleration(list(self._layers), self._config, fused=way == OURS)

    def run(self, way: str, batch: PackedBatch) -> Callable[[], torch.Tensor]:
        """A forward of the batch, in this way from now on."""
        self.use(way)
        return lambda: self.target.features(batch).features

    def differences(self, batch: PackedBatch) -> dict[str, float]:
        """Of both packed ways: relative error of the worst document's median token against plain.

        Raises anchors.WrongResult if they compute something else.
        """
        truth = self.run(PLAIN, batch)()
        found = {}
        for way in (OURS, OWN_LAYERS):
            states = self.run(way, batch)()
            found[f"{way}_difference"] = worst = max(document_errors(batch, states, truth))
            if not worst <= TOLERANCE[truth.dtype]:
                raise anchors.WrongResult(f"{way} and {PLAIN} differ by {worst:.3g}")
        return found


def weight_bytes(target: Target) -> int:
    tensors = [*target.model.parameters(), *target.model.buffers()]
    return sum(x.numel() * x.element_size() for x in tensors)


def measure(ways: Ways, case: Case, device: str, rounds: int) -> Row:
    """One row: the three ways on one batch."""
    target = ways.target
    batch = PackedBatch.random(case.documents, target.model.config.get_text_config().vocab_size)
    row: Row = {"case": case.name, "tokens": batch.num_tokens, "documents": batch.num_documents}
    row |= ways.differences(batch)
    if device == "cuda":
        row |= memory(ways, batch)
    times = timed(ways, batch, device, rounds)
    product_ms = times.pop("product")
    operations = TargetCost.of(target).batch(batch)
    product_rate = anchors.product_flops(device) / product_ms / 1e9
    row |= {"useful_tflop": operations / 1e12, "product_tflops": product_rate}
    for way, ms in times.items():
        rate = operations / ms / 1e9
        row |= {f"{way}_ms": ms, f"{way}_ktok_s": batch.num_tokens / ms}
        row |= {f"{way}_tflops": rate, f"{way}_over_product": rate / product_rate}
    row["over_plain"] = times[PLAIN] / times[OURS]
    row["own_layers_over_plain"] = times[PLAIN] / times[OWN_LAYERS]
    row = tidy(row)
    if device == "cuda":
        row["kinds"] = {way: kinds_of(ways.run(way, batch)) for way in (OURS, PLAIN)}
    return row


def timed(ways: Ways, batch: PackedBatch, device: str, rounds: int) -> dict[str, float]:
    """Median ms of each way, and of a product, over interleaved rounds."""

    def forward(way: str) -> Callable[[], float]:
        return timer(lambda: ways.target.features(batch), device, lambda: ways.use(way))

    timers = {way: forward(way) for way in WAYS}
    return medians({"product": anchors.timed_products(device)} | timers, rounds)


def memory(ways: Ways, batch: PackedBatch) -> Row:
    """Peaks while a batch is read, and ours over weights and output."""
    output = batch.num_tokens * len(ways.target.handed_taps) * ways.target.hidden_size
    least = weight_bytes(ways.target) + output * ways.target.dtype.itemsize
    row: Row = {"weights_and_output_gib": gib(least)}
    for way in WAYS:
        row[f"{way}_peak_gib"] = peak_of("cuda", ways.run(way, batch))
    return row | {"memory": row[f"{OURS}_peak_gib"] / gib(least)}


def main(argv: Sequence[str]) -> None:
    parser = parser_of("target", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES))
    args = parsed(parser, argv, rounds=5, cpu_rounds=3)
    on_gpu = args.device == "cuda"
    result: Row = {"benchmark": "target", "options": {"rounds": args.rounds}, "rows": [], "fp8": {}}
    for name in args.shapes or (CUDA_SHAPES if on_gpu else CPU_SHAPES):
        shape = SHAPES[name]
        dtype = torch.bfloat16 if on_gpu else torch.float32
        ways = Ways(random_target(shape, args.device, dtype))
        for case in cases(args.device):
            row = {"shape": name, "layers": shape.cut} | measure(
                ways, case, args.device, args.rounds
            )
            result["rows"].append(row)
            keep(args.json, result)
            print(line(row), flush=True)
        if on_gpu:
            ways.use(OURS)
            result["fp8"][name] = measure_fp8(
                ways.target, name, cases(args.device), args.device, args.rounds
            )
            keep(args.json, result)
            print("\n".join(line(row) for row in chain(*result["fp8"][name].values())), flush=True)
        ways.use(PLAIN)
        del ways  # the next model's peak is its own
        release(torch.device(args.device))
