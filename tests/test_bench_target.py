"""`bench target` on the CPU: batches, the three ways over one model, refusals, kinds, tables."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_targets import one_thread, tiny_model  # noqa: F401

from dflash_ext.batch import PackedBatch
from dflash_ext.bench import anchors, kernel_kinds, target, target_problem
from dflash_ext.bench.kernel_kinds import Kernel
from dflash_ext.bench.target import OURS, OWN_LAYERS, PLAIN, WAYS, NotAccelerated, Ways
from dflash_ext.bench.target_fp8 import measure_fp8
from dflash_ext.bench.target_problem import (
    SHAPES,
    Case,
    cases,
    drawn_lengths,
    random_target,
)
from dflash_ext.bench.target_table import target_details, target_table
from dflash_ext.target import Target

TINY = SHAPES["tiny-qwen3"]
CASE = Case("9, 30, 14", (9, 30, 14))


def test_lengths_are_those_asked_for():
    lengths = drawn_lengths(100_000, 1500, 8192)
    assert lengths.mean() == pytest.approx(1500, rel=0.02)
    assert lengths.max() == 8192
    for device, budget in (("cuda", 49152), ("cpu", 1024)):
        long, short, mix = (case.documents for case in cases(device))
        assert sum(long) == sum(short) == budget
        assert 0.95 * budget < sum(mix) <= budget
        assert len(set(mix)) > 1


def test_published_shapes_are_cut_behind_their_last_tap():
    eight, mixture = SHAPES["qwen3-8b"], SHAPES["qwen3-moe-30b-a3b"]
    assert eight.tap_ids == (1, 9, 17, 25, 33)
    assert (eight.cut, mixture.cut) == (34, 46)


def test_ways_are_what_their_names_say(monkeypatch):
    """Seen by what runs: calls of our attention, of the layers' own forward, of SDPA."""
    target_ = random_target(TINY, "cpu", torch.float32)
    ways, batch = Ways(target_), PackedBatch.random(CASE.documents, 128)
    untouched = {name: set(vars(m)) for name, m in target_.model.named_modules()}
    seen: list[str] = []

    def watch(owner, name, what):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (seen.append(what), real(*a, **k))[1])

    watch(torch.nn.functional, "scaled_dot_product_attention", "sdpa")
    watch(type(target_.model.model.layers[0]), "forward", "own layer")
    watch(__import__("dflash_ext.packing", fromlist=["x"]), "causal_attention", "packed")
    counts = {}
    for way in (PLAIN, OURS, OWN_LAYERS, OURS):
        run = ways.run(way, batch)
        seen.clear()
        run()
        counts[way] = {what: seen.count(what) for what in ("sdpa", "own layer", "packed")}
    layers = target_.num_layers
    assert counts[OURS] == {"sdpa": 0, "own layer": 0, "packed": layers}
    assert counts[OWN_LAYERS] == {"sdpa": 0, "own layer": layers, "packed": layers}
    assert counts[PLAIN]["packed"] == 0
    # 9 and 14 tokens together, or all three: whichever the plan prefers, never one by one.
    assert counts[PLAIN]["sdpa"] == counts[PLAIN]["own layer"] < 3 * layers
    assert {name: set(vars(m)) for name, m in target_.model.named_modules()} == untouched


def test_plain_has_no_mask_to_read(monkeypatch):
    """SDPA's causal kernels are the fast ones: plain transformers is not held back by a mask."""
    real, masks = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*args, **options):
        masks.append((options.get("attn_mask"), options.get("is_causal")))
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    Ways(random_target(TINY, "cpu", torch.float32)).run(
        PLAIN, PackedBatch.random(CASE.documents, 128)
    )()
    assert set(masks) == {(None, True)}


def test_what_is_not_accelerated_is_not_measured(monkeypatch):
    with pytest.raises(NotAccelerated, match="0 of 4 layers are fused, its forward is padded"):
        Ways(Target(tiny_model(head_dim=16)))
    monkeypatch.setattr("dflash_ext.acceleration.can_fuse", lambda *_: False)
    with pytest.raises(NotAccelerated, match="0 of 4 layers are fused, its forward is packed"):
        Ways(Target(tiny_model(head_dim=64)))


def test_what_computes_something_else_is_not_measured(monkeypatch):
    ways = Ways(random_target(TINY, "cpu", torch.float32))
    real = Ways.run
    monkeypatch.setattr(
        Ways, "run", lambda s, way, b: lambda: real(s, way, b)() * (1.01 if way == OURS else 1)
    )
    with pytest.raises(anchors.WrongResult, match="ours and plain differ by"):
        ways.differences(PackedBatch.random(CASE.documents, 128))


def test_measures_saves_and_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(target, "cases", lambda device: (CASE,))
    monkeypatch.setattr(anchors, "CPU_PRODUCT", 64)
    out = tmp_path / "target_cpu.json"
    options = ["--device", "cpu", "--shapes", "tiny-qwen3", "--rounds", "2", "--json", str(out)]
    target.main(options)
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert (row["tokens"], row["documents"], row["layers"]) == (53, 3, 4)
    weights = 4 * (64 * (2 * 128 + 2 * 64) + 3 * 64 * 96)  # q, o, k, v and the gated products
    pairs = sum(n * (n + 1) // 2 for n in CASE.documents)
    useful = 2 * weights * 53 + 4 * 4 * 2 * 64 * pairs
    assert row["useful_tflop"] == pytest.approx(useful / 1e12, rel=1e-3)
    for way in WAYS:
        rate = row["useful_tflop"] / row[f"{way}_ms"] * 1e3
        assert row[f"{way}_tflops"] == pytest.approx(rate, rel=1e-2)
        assert row[f"{way}_ktok_s"] == pytest.approx(53 / row[f"{way}_ms"], rel=1e-2)
    assert row["over_plain"] == pytest.approx(row["plain_ms"] / row["ours_ms"], rel=1e-2)
    assert max(row["ours_difference"], row["own_layers_difference"]) < 1e-5
    assert "over_plain" in capsys.readouterr().out
    assert "| tiny-qwen3 | 4 | 9, 30, 14 |" in target_table(result)


def test_fp8_is_compared_on_the_same_weights(tmp_path):
    """bf16 errs little, FP8 more, each tap more than none; the tables show both."""
    ours = random_target(TINY, "cpu", torch.bfloat16)
    before = {name: value.clone() for name, value in ours.model.state_dict().items()}
    measured = measure_fp8(ours, "tiny-qwen3", (CASE,), "cpu", rounds=1)
    assert all(torch.equal(ours.model.state_dict()[name], x) for name, x in before.items())
    assert [row["tap"] for row in measured["taps"]] == list(ours.tap_ids)
    for row in measured["taps"]:
        assert 0 < row["bf16"] < row["fp8"] < 0.3
    (row,) = measured["rows"]
    assert row["tokens"] == 53
    assert row["fp8_over_ours"] == pytest.approx(row["ours_ms"] / row["fp8_ms"], rel=1e-2)
    result = {"rows": [], "fp8": {"tiny-qwen3": measured}}
    assert "| tiny-qwen3 | 9, 30, 14 |" in target_table(result)
    assert f"| tiny-qwen3 | {ours.tap_ids[-1]} |" in target_details(result)


NAMES = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64": "products",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel<cutlass::gemm::": "products",
    "hopper_fwd_kernel": "attention",
    "attention_fwd_kernel": "attention",
    "attention_layout_kernel": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "rms_norm_fwd_kernel": "row-wise",
    "head_norm_rope_fwd_kernel": "row-wise",
    "swiglu_fwd_kernel": "row-wise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel": "row-wise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps": "row-wise",
    "hopper_bwd_dkv_kernel": "attention",
    "vocabulary_gradient_kernel": "loss",
    "Memset (Device)": "rest",
    "void at::native::radixSortKVInPlace": "rest",
}


def test_kernels_are_told_apart_by_name():
    kernels = [Kernel(name, 1, 2.0) for name in NAMES]
    assert {k.name: kernel_kinds.kind_of(k.name) for k in kernels} == NAMES
    sums = kernel_kinds.by_kind(kernels)
    counts = {"attention": 6, "products": 3, "loss": 1, "row-wise": 5, "rest": 2}
    assert sums == {kind: 2.0 * count for kind, count in counts.items()}
    first = kernel_kinds.longest([*kernels, Kernel("x" * 200, 3, 9.0)], 2)[0]
    assert first == {"name": "x" * 120, "kind": "rest", "calls": 3, "ms": 9.0}


def test_a_gpu_s_row_is_shown_beside_its_goals():
    kinds = {"attention": 100.0, "products": 900.0, "row-wise": 50.0, "rest": 0.0, "longest": []}
    row = {"shape": "qwen3-8b", "layers": 34, "case": "12 x 4096", "over_plain": 1.37}
    row |= {"ours_ktok_s": 43.1, "ours_tflops": 611.0, "ours_over_product": 0.926}
    row |= {"own_layers_over_plain": 1.01, "memory": 1.19, "kinds": {"ours": kinds}}
    result = {"rows": [row, row | {"over_plain": 1.2, "memory": 1.4}]}
    text = target_table(result)
    assert "| 43.1k | 611 | 0.93 | 1.37 (1.35 → 1.42: floor) | 1.01 | 1.19 (1.30: floor) |" in text
    assert "1.20 (1.35 → 1.42: below floor) | 1.01 | 1.40 (1.30: below floor)" in text
    # No column of zeros.
    assert "| ours | 1050 | 100 (10%) | 900 (86%) | 50 (5%) |\n" in target_details(result)


def test_models_are_drawn_in_their_dtype_where_they_stay():
    model = random_target(TINY, "cpu", torch.bfloat16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.num_hidden_layers == target_problem.SHAPES["tiny-qwen3"].cut
