"""The target's packed forward on a real GPU: causal attention, taps, no waits, flat memory."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from own_process import printed_by
from test_attention_gpu import path  # noqa: F401
from test_causal import problem, starts_of
from test_target import fused_layers, packed, true_taps
from tiny_targets import READ_FAMILIES, tiny_model

from dflash_ext.acceleration import document_errors
from dflash_ext.batch import PackedBatch
from dflash_ext.bench import target as bench
from dflash_ext.bench.kernel_kinds import kernels_of, kind_of
from dflash_ext.bench.target_problem import SHAPES, Case, random_target
from dflash_ext.ops.causal import causal_attention, causal_attention_reference, causal_layout
from dflash_ext.target import Target

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
RAGGED = (517, 60, 1, 3, 700, 1, 128, 129)
HEADS = [(4, 1), (2, 4), (2, 7), (1, 8)]  # key-value heads, G; 7 has no Hopper kernel


def check(lengths, *, window=None, sunk=False, **shape) -> None:
    """The 2x rule for slices of a fused projection, overall and for the worst document."""
    q, k, v, sinks = (x.cuda() for x in problem(lengths, dtype=BF16, **shape))
    # `.cuda()` of a slice is its own memory: the slices are cut again from one tensor.
    heads = [q.shape[1], k.shape[1], v.shape[1]]
    q, k, v = torch.cat([q, k, v], dim=1).split(heads, dim=1)
    assert q.stride(0) == sum(heads) * q.shape[2]
    starts, given = starts_of(lengths), sinks if sunk else None
    found = causal_attention(q, k, v, causal_layout(starts, "cuda", window), sinks=given)
    assert found.dtype == BF16
    assert found.isfinite().all()
    truth, rounded = (
        causal_attention_reference(
            *(x.to(dtype) for x in (q, k, v)),
            starts,
            window=window,
            sinks=None if given is None else given.to(dtype),
        ).double()
        for dtype in (torch.float64, BF16)
    )
    for rows in [slice(None), *(slice(a, b) for a, b in zip(starts.tolist(), starts[1:].tolist()))]:
        error, allowed = ((x[rows] - truth[rows]).norm() for x in (found.double(), rounded))
        assert error <= 2 * allowed + 2e-3 * truth[rows].norm(), rows


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("Hkv", "G"), HEADS)
def test_ragged_documents(Hkv, G, D, path):  # noqa: F811
    check(RAGGED, Hkv=Hkv, G=G, D=D)


@pytest.mark.parametrize("window", [1, 7, 128, 300])
@pytest.mark.parametrize(("Hkv", "G", "D"), [(2, 4, 128), (2, 7, 128), (1, 8, 64), (4, 1, 256)])
def test_windows(window, Hkv, G, D, path):  # noqa: F811
    check(RAGGED, window=window, Hkv=Hkv, G=G, D=D)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("Hkv", "G", "D"), [(1, 8, 64), (2, 4, 128)])
def test_sinks(window, Hkv, G, D, path):  # noqa: F811
    check(RAGGED, window=window, sunk=True, Hkv=Hkv, G=G, D=D)


@pytest.mark.parametrize("lengths", [(1,) * 64, tuple(range(1, 65)), (1,), (2049,)])
def test_many_short_documents_and_a_long_one(lengths, path):  # noqa: F811
    check(lengths, Hkv=2, G=4, D=128)


def test_another_document_and_the_future_change_no_bit(path):  # noqa: F811
    q, k, v, _ = (x.cuda() for x in problem((300, 200), G=4, D=128, dtype=BF16))
    layout = causal_layout(starts_of((300, 200)), "cuda")
    before = causal_attention(q, k, v, layout)
    k, v = k.clone(), v.clone()
    k[400:], v[400:] = 1e3, 1e3
    k[:300], v[:300] = -1e3, 1e3
    after = causal_attention(q, k, v, layout)
    assert torch.equal(before[300:400], after[300:400])
    assert not torch.equal(before[400:], after[400:])


# ---- the whole forward


@pytest.mark.parametrize("family", READ_FAMILIES)
def test_taps_of_every_family(family):
    """2x rule: ours in bf16 against transformers' own in bf16, the model in fp32 as the truth."""
    batch = packed((61, 3, 150, 12, 1))
    truth = true_taps(tiny_model(family, head_dim=64), batch).cuda()
    model = tiny_model(family, head_dim=64).bfloat16().cuda()
    own = true_taps(model, dataclasses.replace(batch, input_ids=batch.input_ids.cuda())).float()
    target = Target(model, tap_ids=(1, 3))
    assert fused_layers(target) == 4
    found = target.features(batch)
    found.verify(batch, (1, 3), target.hidden_size)
    assert found.features.dtype == BF16
    expected = torch.cat([truth[1], truth[3]], -1)
    error_own = (torch.cat([own[1], own[3]], -1) - expected).norm()
    error = (found.features.float() - expected).norm()
    assert error <= 2 * error_own + 1e-3 * expected.norm()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_errs_as_its_emulation_does(family):
    """Products, grouped ones of the mixture too: against fp32 no further off than on the CPU."""
    batch = packed((61, 3, 150, 12, 1))
    truth = true_taps(tiny_model(family, head_dim=64), batch)
    expected = torch.cat([truth[1], truth[3]], -1)
    errors = []
    for device in ("cpu", "cuda"):
        target = Target(tiny_model(family, head_dim=64).bfloat16().to(device), tap_ids=(1, 3))
        target.quantise()
        assert fused_layers(target) == 4
        kinds = {type(module).__name__ for module in target.model.modules()}
        assert ("Fp8Experts" in kinds) == (family == "qwen3_moe")
        found = target.features(batch).features.float().cpu()
        errors.append(max(document_errors(batch, found, expected)))
    emulated, real = errors
    assert 0 < real <= 1.5 * emulated


@pytest.fixture
def small() -> Target:
    return random_target(SHAPES["tiny-qwen3"], "cuda", BF16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3"])
def test_a_steady_forward_never_waits_for_the_device(family):
    target = Target(tiny_model(family, head_dim=64).bfloat16().cuda())
    assert fused_layers(target) == 4
    batches = [packed((61, 3, 150)), packed((7, 99), seed=1)]
    for batch in batches:
        target.features(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            target.features(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def print_growth() -> None:
    """Reserved memory over 100 batches of random lengths, behind the largest and some others."""
    wide = {"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 64}
    model = tiny_model("llama", num_attention_heads=16, num_key_value_heads=4, **wide)
    target, longest = Target(model.bfloat16().cuda()), 4096
    assert fused_layers(target) == 4
    g = torch.Generator().manual_seed(0)
    reserved = []
    for i in range(120):
        lengths = torch.randint(1, longest + 1, (4,), generator=g).tolist() if i else [longest] * 4
        target.features(PackedBatch.random(lengths, 96))
        reserved.append(torch.cuda.memory_reserved())
    print(max(reserved) / reserved[20] - 1)


def test_memory_is_flat_over_random_lengths():
    assert float(printed_by("import test_target_gpu; test_target_gpu.print_growth()")) <= 0.01


def test_threads_on_streams_equal_serial(small):
    batches = [PackedBatch.random((100 + 31 * i, 7, 64 * (i + 1)), 128) for i in range(4)]
    serial = [small.features(batch).features for batch in batches]
    torch.cuda.synchronize()
    barrier = threading.Barrier(4)

    def work(batch: PackedBatch) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(10):
                found = small.features(batch).features
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(work, batches), serial, strict=True):
            assert torch.equal(found, expected)


def test_bench_on_a_gpu(tmp_path, monkeypatch, capsys):
    """Every part of the command, on a model too small for its numbers to mean anything."""
    monkeypatch.setattr(bench, "cases", lambda device: (Case("mix", (300, 40, 150, 1)),))
    out = tmp_path / "target.json"
    bench.main(["--shapes", "tiny-qwen3", "--rounds", "2", "--json", str(out)])
    row = json.loads(out.read_text())["rows"][0]
    assert row["memory"] >= 1
    assert row["over_plain"] > 0
    kinds = row["kinds"]["ours"]
    assert min(kinds["products"], kinds["attention"], kinds["row-wise"]) > 0
    assert "ours, ms: attention" in capsys.readouterr().out


def test_our_kernels_have_the_names_that_tell_their_kind(small):
    batch = PackedBatch.random((300, 40), 128)
    small.features(batch)
    kernels = kernels_of(lambda: small.features(batch))
    calls = {
        kind: sum(k.calls for k in kernels if kind_of(k.name) == kind)
        for kind in ("attention", "products")
    }
    layers = small.num_layers
    assert calls["attention"] >= layers  # and the layout
    assert calls["products"] >= 7 * layers  # a product split over its inner length takes two
