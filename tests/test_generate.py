"""Speculative decoding is lossless, accepts what it should, and stops where it should."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_targets import FAMILIES, VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError
from dflash_ext.generate import (
    PromptLookup,
    greedy_decode,
    matching_prefix,
    prompt_lookup_decode,
    speculative_decode,
    until_stop,
)
from dflash_ext.target import Target


def drafter_for(target: Target, *, block_size: int = 8, seed: int = 0, **changes) -> Drafter:
    torch.manual_seed(seed)
    config = dict(
        hidden_size=target.hidden_size,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        intermediate_size=96,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=12,
        block_size=block_size,
        mask_token_id=VOCAB - 1,
        target_layer_ids=target.tap_ids,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
    )
    return Drafter(DrafterConfig(**{**config, **changes}))


class Oracle:
    """Stands in for a drafter: knows the continuation and gets the first `right` slots right."""

    def __init__(self, target: Target, prompt_length: int, truth: list[int], right, block_size=8):
        self.config = drafter_for(target, block_size=block_size).config
        self.truth, self.right, self.offset = truth, itertools.cycle(right), prompt_length
        self.head = target.vocabulary().head
        self.features = torch.zeros(0, self.config.feature_width)

    def new_cache(self, capacity, *, device, dtype):
        return None

    def extend_cache(self, cache, features):
        self.features = torch.cat([self.features, features])

    def draft(self, cache, block_embeds):
        begin, right = len(self.features) - self.offset, next(self.right)
        ids = (self.truth + [3] * 32)[begin : begin + self.config.block_size]
        ids = [t if k <= right else (t + 1) % VOCAB for k, t in enumerate(ids)]
        # Rows of the head's pseudo-inverse: times the head they are one-hot logits.
        return torch.linalg.pinv(self.head)[:, ids].T


@pytest.fixture(scope="module")
def wide() -> Target:
    """Hidden size above the vocabulary's, so that Oracle can name any token."""
    return Target(tiny_model(hidden_size=128, num_hidden_layers=2))


def rollout(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without any cache: the truth that everything is held against."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(
                int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
    return ids[len(prompt) :]


def prompts(count: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, VOCAB, (count, length), generator=generator).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_decoding_gives_the_target_s_greedy_tokens(family):
    target = Target(tiny_model(family), tap_ids=(0, 1, 3))
    drafter = drafter_for(target)
    prompt = prompts(1)[0]
    truth = rollout(target, prompt, 40)
    assert greedy_decode(target, prompt, 40).tokens == truth
    ours = speculative_decode(target, drafter, prompt, 40)
    assert ours.tokens == truth
    assert prompt_lookup_decode(target, prompt, 40, block_size=6).tokens == truth
    assert 40 <= 1 + sum(ours.accepted) < 40 + 8
    assert not ours.stopped


def test_thousands_of_tokens_are_identical():
    target = Target(tiny_model("qwen3", num_hidden_layers=2))
    drafter = drafter_for(target, num_layers=1, layer_types=("full_attention",))
    total = 0
    for prompt in prompts(4):
        truth = greedy_decode(target, prompt, 500).tokens
        assert speculative_decode(target, drafter, prompt, 500).tokens == truth
        total += len(truth)
    assert total == 2000
    assert prompt_lookup_decode(target, prompt, 500, block_size=16).tokens == truth


def test_a_perfect_drafter_is_accepted_whole(wide):
    prompt = prompts(1)[0]
    truth = greedy_decode(wide, prompt, 65).tokens
    oracle = Oracle(wide, len(prompt), truth, right=[7])
    got = speculative_decode(wide, oracle, prompt, 65)
    assert got.tokens == truth
    assert got.accepted == [8] * 8  # 1 + 64


def test_partly_right_drafts_are_accepted_as_far_as_they_are_right(wide):
    prompt, right = prompts(2)[1], [0, 3, 7, 1, 5]
    truth = greedy_decode(wide, prompt, 100).tokens
    oracle = Oracle(wide, len(prompt), truth, right=right)
    got = speculative_decode(wide, oracle, prompt, 90)
    assert got.tokens == truth[:90]
    assert got.accepted == [r + 1 for r, _ in zip(itertools.cycle(right), got.accepted)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_drafter_gets_the_features_of_kept_tokens_and_no_others(family):
    target = Target(tiny_model(family, hidden_size=128), tap_ids=(0, 3))
    prompt = prompts(1)[0]
    truth = greedy_decode(target, prompt, 60).tokens
    oracle = Oracle(target, len(prompt), truth, right=[2, 0, 7, 4])
    speculative_decode(target, oracle, prompt, 50)
    kept = len(oracle.features)
    _, expected = target.forward_with_taps(
        torch.tensor((prompt + truth)[:kept]), target.new_cache()
    )
    torch.testing.assert_close(oracle.features, expected, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 10, 23])
def test_max_new_tokens_is_exact(wide, count):
    prompt = prompts(1)[0]
    truth = greedy_decode(wide, prompt, 60).tokens
    oracle = Oracle(wide, len(prompt), truth, right=[7])
    assert greedy_decode(wide, prompt, count).tokens == truth[:count]
    assert speculative_decode(wide, oracle, prompt, count).tokens == truth[:count]
    assert prompt_lookup_decode(wide, prompt, count, block_size=16).tokens == truth[:count]


def test_a_stop_token_anywhere_in_a_block_ends_it_there(wide):
    prompt = next(p for p in prompts(40) if len(set(greedy_decode(wide, p, 30).tokens)) > 20)
    truth = greedy_decode(wide, prompt, 30).tokens
    first_seen = [i for i, token in enumerate(truth) if token not in truth[:i]]
    assert len([i for i in first_seen if i <= 12]) > 8  # the first token, every slot, the bonus
    for i in first_seen:
        if i > 12:
            break
        stop = {truth[i], 10**6}
        for right in ([7], [3]):
            oracle = Oracle(wide, len(prompt), truth, right=right)
            got = speculative_decode(wide, oracle, prompt, 30, stop)
            assert got.tokens == truth[: i + 1]
            assert got.stopped
            assert 1 + sum(got.accepted) == i + 1
        assert greedy_decode(wide, prompt, 30, stop).tokens == truth[: i + 1]
        assert prompt_lookup_decode(wide, prompt, 30, stop, block_size=16).tokens == truth[: i + 1]
    cut = speculative_decode(
        wide, Oracle(wide, len(prompt), truth, right=[7]), prompt, 9, {truth[10]}
    )
    assert cut.tokens == truth[:9]
    assert not cut.stopped


def test_one_wait_for_the_device_per_step(wide, monkeypatch):
    prompt = prompts(1)[0]
    drafter = drafter_for(wide)
    waits = 0
    real = torch.Tensor.tolist

    def counted(tensor):
        nonlocal waits
        waits += 1
        return real(tensor)

    def forbidden(tensor, *args):
        raise AssertionError("a scalar was read back")

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for name in ("item", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    monkeypatch.setattr(wide, "model", StubModel(wide))
    got = speculative_decode(wide, drafter, prompt, 20)
    assert waits == len(got.accepted) + 1  # and one for the first token


class StubModel:
    """A target without transformers' own reads of scalars: random logits, hooks fed by hand."""

    def __init__(self, target: Target) -> None:
        self.config, self.target = target.model.config, target

    def __call__(self, input_ids, logits_to_keep=0, **keywords):
        capture = self.target._local.capture
        cache = keywords["cache" if "cache" in keywords else "past_key_values"]
        n = input_ids.shape[1]
        for layer in range(self.target.num_layers):
            cache.update(torch.zeros(1, 1, n, 2), torch.zeros(1, 1, n, 2), layer)
        for tap in self.target.tap_ids:
            capture.taps[tap] = torch.randn(n, self.target.hidden_size)
        output = type("Output", (), {})()
        output.logits = torch.randn(1, n, VOCAB)
        return output


def test_prompt_lookup_proposes_what_followed_the_longest_match():
    def lookup(text):
        proposer = PromptLookup(5, torch.device("cpu"))
        proposer.observe(text[:2])
        proposer.observe(text[2:])
        return proposer.lookup()

    assert lookup([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]
    assert lookup([9, 3, 8, 8, 8, 1, 2, 3, 4, 5, 6, 7, 2, 3]) == [4, 5, 6, 7]  # (2, 3) before (3,)
    assert lookup([1, 5, 1, 6, 1]) == [6, 1, 6, 1]  # the last occurrence; the copy runs into itself
    assert lookup([4, 4]) == [4, 4, 4, 4]
    assert lookup([1, 2, 3]) == []
    assert lookup([7, 8]) == []


def test_prompt_lookup_profits_from_repetition():
    """With small weights greedy decoding ends in a cycle, which a copy predicts perfectly."""
    target = Target(tiny_model(num_hidden_layers=2, std=0.02))
    got = prompt_lookup_decode(target, prompts(1)[0], 100, block_size=8)
    assert got.tokens == greedy_decode(target, prompts(1)[0], 100).tokens
    assert got.accepted[-5:] == [8] * 5


def test_helpers():
    assert matching_prefix([1, 2, 3], [1, 2, 4, 9]) == 2
    assert matching_prefix([], [5]) == 0
    assert matching_prefix([1], [1, 2]) == 1
    assert until_stop([1, 2, 3], {2}) == [1, 2]
    assert until_stop([1, 2, 3], ()) == [1, 2, 3]


def test_errors(wide):
    with pytest.raises(UserError, match="empty prompt"):
        greedy_decode(wide, [], 4)
    with pytest.raises(UserError, match="exceed the target's 4096 positions"):
        speculative_decode(wide, drafter_for(wide), [5] * 4080, 10)
    with pytest.raises(UserError, match="expected 1 taps × 128, got 2"):
        speculative_decode(wide, drafter_for(wide, target_layer_ids=(1,)), [5], 10)
