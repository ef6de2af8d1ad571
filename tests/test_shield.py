"""Shielded modules compute, hook and register as before, whatever nn.Module.__call__ is."""

from __future__ import annotations

import pytest
import torch
from tiny_targets import FAMILIES, one_thread, tiny_model  # noqa: F401
from torch import nn
from transformers import DynamicCache

from dflash_ext.shield import shield
from dflash_ext.target import Target


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shielded_target_is_the_same_target(family, monkeypatch):
    model, ids = tiny_model(family), torch.arange(5)[None]
    names = [type(m).__name__ for m in model.modules()]
    taps = Target(model, tap_ids=(1,))
    logits, features = taps.forward_with_taps(ids, ids, DynamicCache())
    shield(model)
    shield(model)  # twice is once
    assert [type(m).__name__ for m in model.modules()] == names

    def patched(self, *args, **kwargs):
        raise NameError("module is not installed as a submodule")  # what FX tracing does

    monkeypatch.setattr(nn.Module, "__call__", patched)
    with pytest.raises(NameError):
        nn.Linear(2, 2)(torch.ones(2))
    again, features_again = taps.forward_with_taps(ids, ids, DynamicCache())
    assert torch.equal(again, logits)
    assert torch.equal(features_again, features)


def test_a_class_with_its_own_call_is_left_alone():
    class Own(nn.Module):
        def __call__(self, x):
            return x + 1

    module = nn.Sequential(Own(), nn.Identity())
    shield(module)
    assert type(module[0]) is Own
    assert type(module[1]) is not nn.Identity
    assert module(torch.tensor(1)) == 2
