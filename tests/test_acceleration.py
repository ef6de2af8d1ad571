"""What runs on our kernels, and only if it computes what the model does."""

from __future__ import annotations

import threading

import pytest
import torch
from test_target import fused_layers, packed, true_taps
from tiny_targets import one_thread, tiny_hybrid, tiny_model  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_ext import packing
from dflash_ext.packing import Packing, packed_inputs
from dflash_ext.packing import packed as packed_forward
from dflash_ext.target import Target


@pytest.fixture
def log(caplog):
    caplog.set_level("INFO", logger="dflash_ext")
    return caplog


def check_taps(model, target, batch) -> None:
    truth = true_taps(model, batch)
    expected = torch.cat([truth[tap] for tap in target.tap_ids], dim=-1)
    found = target.features(batch).features
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_says_once_what_it_does(log):
    target = Target(tiny_model(head_dim=64), path="some/model")
    target.features(packed())
    assert log.messages == ["target 'some/model': packed forward, fused layers"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model(head_dim=16), "ValueError: head_dim 16 is not supported: use one of"),
        (lambda: tiny_hybrid(), "no kernels for layers of linear_attention"),
        (
            lambda: tiny_model(head_dim=64, attn_implementation="flex_attention"),
            "attention 'flex_attention' was chosen for it",
        ),
    ],
    ids=["head_dim", "hybrid", "chosen"],
)
def test_what_has_no_kernels_runs_as_it_does_in_transformers(model, reason, log):
    target = Target(model(), path="m")
    assert target.acceleration is None
    assert log.messages[-1].startswith(
        f"target 'm': padded forward, as transformers runs it: {reason}"
    )


def test_a_layer_that_computes_something_else_stays_its_own(log):
    """The parts are those of a Llama layer; what is done with them is not."""
    model = tiny_model(head_dim=64)
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x, before=mlp.forward: -before(x)
    target = Target(model, tap_ids=(0, 3))
    assert target.acceleration is not None
    assert fused_layers(target) == 0
    assert log.messages[-1].endswith("packed forward, transformers' own layers")
    check_taps(model, target, packed())


def test_attention_that_sees_something_else_is_not_packed(log, monkeypatch):
    real = packing.causal_layout
    monkeypatch.setattr(packing, "causal_layout", lambda starts, device, _: real(starts, device, 3))
    model = tiny_model(head_dim=64)
    target = Target(model, tap_ids=(0, 3))
    assert target.acceleration is None
    assert "its packed states differ by" in log.messages[-1]
    check_taps(model, target, packed())


def test_attention_with_a_term_we_do_not_have_is_not_packed(log, monkeypatch):
    model = tiny_model(head_dim=64)
    modeling = __import__(type(model).__module__, fromlist=["x"])
    real = modeling.ALL_ATTENTION_FUNCTIONS.get_interface

    def capped(*args):
        # sdpa refuses it itself, and the padded forward is the one it is compared with.
        cap = {} if packing.current_packing() is None else {"softcap": 30.0}
        return lambda *a, **k: real(*args)(*a, **k, **cap)

    # Only layers that are not fused ask the interface.
    monkeypatch.setattr(modeling.ALL_ATTENTION_FUNCTIONS, "get_interface", capped)
    monkeypatch.setattr("dflash_ext.acceleration.can_fuse", lambda *_: False)
    assert Target(model).acceleration is None
    assert "attention with softcap is not supported in a packed forward" in log.messages[-1]


def test_removed_without_a_trace():
    model, batch = tiny_model("gemma3", head_dim=64), packed()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    parts = {name: set(vars(module)) for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    logits = model(batch.input_ids[None, :9]).logits
    target = Target(model)
    assert target.acceleration is not None
    assert torch.equal(model(batch.input_ids[None, :9]).logits, logits)
    target.acceleration.remove()
    assert model.config._attn_implementation == attention
    assert {name: set(vars(module)) for name, module in model.named_modules()} == parts
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name])


def test_only_the_thread_that_packs_is_packed():
    model, batch = tiny_model(head_dim=64), packed((9, 14))
    Target(model)
    ids = batch.input_ids[None]
    expected = model(ids).logits
    found: list[torch.Tensor] = []
    with torch.no_grad(), packed_forward(Packing(batch.doc_starts)):
        mine = model(**packed_inputs(batch.input_ids, batch.positions())).logits
        thread = threading.Thread(target=lambda: found.append(model(ids).logits))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert not torch.allclose(mine[:, 9:], expected[:, 9:], atol=1e-2)  # its own document alone


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_nothing_of_tokens_by_tokens_is_made():
    target = Target(tiny_model("mistral", head_dim=64), tap_ids=(0, 2))
    batch = packed((300, 200, 500))
    with Largest() as largest:
        target.features(batch)
    assert largest.numel == 1000 * 4 * 64  # queries; a mask would be four times that


def test_angles_in_any_order_of_memory_are_taken():
    """transformers 5.6 hands out gpt-oss's transposed: our operator wants rows."""
    angles = torch.randn(2, 5, 64)
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = (x.to(dtype).T.contiguous().T[None] for x in angles)
        assert cos.stride(-1) == 5
        found = Packing(torch.tensor([0, 5])).tables((cos, sin), 64)
        for table, truth in zip(found, (cos, sin)):
            assert table.is_contiguous()
            assert torch.equal(table, truth[0, :, :32].float())
