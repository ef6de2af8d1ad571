"""Causal attention of packed documents against a naive one, document by document, in fp64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.ops.causal import causal_attention, causal_attention_reference, causal_layout


def starts_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def problem(lengths, Hkv=2, G=3, D=64, dtype=torch.float32, seed=0):
    """q, k, v as slices of one fused projection, and sinks."""
    g = torch.Generator().manual_seed(seed)
    fused = torch.randn(sum(lengths), Hkv * (G + 2), D, generator=g).to(dtype)
    q, k, v = fused.split([Hkv * G, Hkv, Hkv], dim=1)
    return q, k, v, torch.randn(Hkv * G, generator=g).to(dtype)


def check(lengths, *, window=None, scale=None, sunk=False, **shape) -> None:
    q, k, v, sinks = problem(lengths, **shape)
    options = {"scale": scale, "sinks": sinks if sunk else None}
    found = causal_attention(q, k, v, causal_layout(starts_of(lengths), "cpu", window), **options)
    if sunk:
        options["sinks"] = sinks.double()
    truth, rounded = (
        causal_attention_reference(
            *(x.to(dtype) for x in (q, k, v)), starts_of(lengths), window=window, **options
        )
        for dtype in (torch.float64, q.dtype)
    )
    assert found.dtype == q.dtype
    error, allowed = (found.double() - truth).norm(), (rounded.double() - truth).norm()
    assert error <= 2 * allowed + 1e-6 * truth.norm()


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 100),
    heads=st.sampled_from([(1, 1), (2, 4), (1, 7), (1, 16)]),
    sunk=st.booleans(),
    bf16=st.booleans(),
)
def test_any_documents(lengths, window, heads, sunk, bf16):
    dtype = torch.bfloat16 if bf16 else torch.float32
    check(lengths, window=window, sunk=sunk, Hkv=heads[0], G=heads[1], dtype=dtype)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_head_dims_and_scale(D):
    check((33, 130), D=D, scale=0.3)


def test_another_document_and_the_future_change_no_bit():
    lengths = (40, 25)
    q, k, v, _ = problem(lengths)
    layout = causal_layout(starts_of(lengths), "cpu")
    before = causal_attention(q, k, v, layout)
    k, v = k.clone(), v.clone()
    k[50:], v[50:] = 1e3, 1e3
    k[:40], v[:40] = -1e3, 1e3
    after = causal_attention(q, k, v, layout)
    assert torch.equal(before[40:50], after[40:50])
    assert not torch.equal(before[50:], after[50:])


def test_sinks_take_their_share():
    """With a sink as strong as its only key, a token keeps half of its value."""
    q = torch.zeros(1, 1, 64)
    k, v = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    out = causal_attention(q, k, v, causal_layout(starts_of((1,)), "cpu"), sinks=torch.zeros(1))
    torch.testing.assert_close(out, v / 2)


def test_threads_agree():
    lengths = (70, 3, 64)
    q, k, v, sinks = problem(lengths)
    layout = causal_layout(starts_of(lengths), "cpu", 20)
    expected = causal_attention(q, k, v, layout, sinks=sinks)
    with ThreadPoolExecutor(4) as pool:
        calls = pool.map(lambda _: causal_attention(q, k, v, layout, sinks=sinks), range(20))
        assert all(torch.equal(found, expected) for found in calls)


def test_no_documents_and_wrong_options():
    empty = problem(())
    layout = causal_layout(starts_of(()), "cpu")
    assert causal_attention(*empty[:3], layout).shape == (0, 6, 64)
    with pytest.raises(ValueError, match="window 0 must be at least 1"):
        causal_layout(starts_of((3,)), "cpu", 0)
    q, k, v, _ = problem((5,), D=96)
    with pytest.raises(ValueError, match="head_dim 96 is not supported: use one of"):
        causal_attention(q, k, v, causal_layout(starts_of((5,)), "cpu"))
