"""Every way of decoding gives the target's own text, accepts what it should, stops where it should.

Truth: transformers' `generate`, or a rollout without any cache.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf
from oracle import Oracle
from tiny_targets import (  # noqa: F401
    FAMILIES,
    VOCAB,
    one_thread,
    tiny_hybrid,
    tiny_model,
)

from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError
from dflash_ext.generate import (
    decode,
    plain_decode,
    prompt_lookup_decode,
    speculative_decode,
    until_stop,
)
from dflash_ext.proposers import RECORDED, DrafterProposer, Nobody, PromptLookup
from dflash_ext.reader import AttentionReader
from dflash_ext.sampling import GREEDY, Sampling, draw
from dflash_ext.target import Target
from dflash_ext.transformers_api import cache_argument

LENGTHS = (9, 23, 4, 15)
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=7)


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


@pytest.fixture(scope="module")
def small() -> Target:
    return Target(tiny_model(num_hidden_layers=2))


def varied(family: str, **changes) -> Target:
    """Untied, or a large embedding repeats its own token for ever, whatever the caches hold."""
    return Target(tiny_model(family, tie_word_embeddings=False), **changes)


def theirs(target: Target, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy text."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = target.model.generate(ids, max_new_tokens=count, **options)
    return out[0, len(prompt) :].tolist()


def plain(target: Target, texts: list[list[int]], count: int, sampling=GREEDY) -> list[list[int]]:
    """The target alone, and every token held against a forward that knows no cache."""
    found = []
    for prompt, got in zip(
        texts, decode(target, Nobody(), texts, count, sampling=sampling, batch=9)
    ):
        whole = torch.tensor([[*prompt, *got.tokens]])
        with torch.no_grad():
            logits = target.model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        places = [len(prompt) + i for i in range(count)]
        assert draw(logits, places, sampling).tolist() == got.tokens
        found.append(got.tokens)
    assert len(set(itertools.chain(*found))) > 12
    return found


def prompts(count: int, lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = itertools.islice(itertools.cycle(lengths), count)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in sizes]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_decoding_gives_the_target_s_text(family):
    """A random drafter, then an oracle so that every accepted length occurs; rows are refilled."""
    target = varied(family, tap_ids=(0, 1, 3))
    drafter, texts, count = drafter_for(target), prompts(4), 16
    truths = plain(target, texts, count + 8)
    expected = [truth[:count] for truth in truths]
    known = {tuple(p): t for p, t in zip(texts, truths)}
    for proposer in (
        DrafterProposer(target, drafter),
        DrafterProposer(target, drafter, tree=12),
        Oracle(known, [0, 7, 3, 1, 6]),
        Oracle(known, [0, 7, 3, 1, 6], tree=20),
    ):
        got = decode(target, proposer, texts, count, batch=3)
        assert [g.tokens for g in got] == expected
        assert all(count <= 1 + sum(g.accepted) < count + 8 for g in got)
        assert not any(g.stopped for g in got)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_sequence_gives_what_transformers_generates(family):
    target, (text,) = varied(family), prompts(1)
    drafter, expected = drafter_for(target), theirs(target, text, 30)
    assert plain_decode(target, text, 30).tokens == expected
    assert speculative_decode(target, drafter, text, 30).tokens == expected
    assert speculative_decode(target, drafter, text, 30, tree=9).tokens == expected
    assert prompt_lookup_decode(target, text, 30, block_size=6).tokens == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_sampled_text_is_the_same_in_every_way(family):
    target = varied(family, tap_ids=(0, 1, 3))
    drafter, texts, count = drafter_for(target), prompts(4), 20
    truths = plain(target, texts, count + 8, SAMPLED)
    expected = [truth[:count] for truth in truths]
    assert expected != plain(target, texts, count)
    known = {tuple(p): t for p, t in zip(texts, truths)}
    for proposer, batch in (
        (DrafterProposer(target, drafter, sampling=SAMPLED), 3),
        (DrafterProposer(target, drafter, tree=12, sampling=SAMPLED), 3),
        (PromptLookup(6, target.device), 4),
        (Oracle(known, [0, 7, 3, 1, 6]), 3),
        (Oracle(known, [0, 7, 3, 1, 6], tree=20), 1),
    ):
        got = decode(target, proposer, texts, count, sampling=SAMPLED, batch=batch)
        assert [g.tokens for g in got] == expected
    other = Sampling(temperature=0.8, seed=8)
    assert plain_decode(target, texts[0], count, sampling=other).tokens != expected[0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_thousands_of_tokens_are_identical(sampling):
    target = Target(tiny_model("qwen3", num_hidden_layers=2))
    texts, count = prompts(8), 130
    truths = plain(target, texts, count + 16, sampling)
    expected, known = [t[:count] for t in truths], {tuple(p): t for p, t in zip(texts, truths)}
    if sampling.greedy:
        assert truths[0] == theirs(target, texts[0], count + 16)
    for proposer in (
        PromptLookup(16, target.device),
        Oracle(known, [*range(16), 15, 9], block_size=16),
        Oracle(known, [*range(16), 15, 9], block_size=16, tree=32),
    ):
        got = decode(target, proposer, texts, count, sampling=sampling, batch=8)
        assert [g.tokens for g in got] == expected


@pytest.mark.parametrize("tree", [0, 20])
def test_guesses_are_accepted_exactly_as_far_as_they_are_right(small, tree):
    texts = prompts(3)
    truths = {tuple(p): t for p, t in zip(texts, plain(small, texts, 100))}
    whole = decode(small, Oracle(truths, [7], tree=tree), texts, 65, batch=2)
    assert [g.accepted for g in whole] == [[8] * 8] * 3  # 1 + 64
    right = [0, 3, 7, 1, 5, 2, 4, 6]
    for prompt in texts:
        (got,) = decode(small, Oracle(truths, right, tree=tree), [prompt], 90)
        assert got.tokens == truths[tuple(prompt)][:90]
        assert got.accepted == [r + 1 for r, _ in zip(itertools.cycle(right), got.accepted)]


@pytest.mark.parametrize("tree", [0, 20])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_drafter_gets_the_features_of_kept_tokens_and_no_others(family, tree):
    target = varied(family, tap_ids=(0, 3))
    texts = prompts(5)
    truths = {tuple(p): t for p, t in zip(texts, plain(target, texts, 36))}
    oracle = Oracle(truths, [2, 0, 7, 4], tree=tree, features=True)
    decode(target, oracle, texts, 28, batch=3)
    for prompt, pieces in oracle.features.items():
        features = torch.cat(pieces)
        text = torch.tensor([[*prompt, *truths[prompt]][: len(features)]])
        places = torch.arange(len(features))[None]
        _, expected = target.forward_with_taps(text, places, tf.DynamicCache())
        torch.testing.assert_close(features, expected, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 10, 23])
def test_max_new_tokens_is_exact(small, count):
    texts = prompts(2)
    truths = {tuple(p): t for p, t in zip(texts, plain(small, texts, 32))}
    expected = [truth[:count] for truth in truths.values()]
    for proposer in (Nobody(), Oracle(truths, [7]), Oracle(truths, [7, 2], tree=16)):
        assert [g.tokens for g in decode(small, proposer, texts, count, batch=2)] == expected


def test_a_stop_token_anywhere_in_a_block_ends_it_there(small):
    texts = prompts(16)
    prompt, truth = max(
        zip(texts, plain(small, texts, 30)), key=lambda pair: len(set(pair[1][:14]))
    )
    first_seen = [i for i, token in enumerate(truth) if token not in truth[:i]]
    assert len([i for i in first_seen if i <= 12]) > 8  # the first token, every slot, the bonus
    known = {tuple(prompt): truth}
    for i in first_seen:
        if i > 12:
            break
        stop = {truth[i], 10**6}
        for proposer in (
            Nobody(),
            PromptLookup(16, small.device),
            Oracle(known, [7]),
            Oracle(known, [3]),
            Oracle(known, [7], tree=16),
        ):
            (got,) = decode(small, proposer, [prompt], 30, stop)
            assert got.tokens == truth[: i + 1]
            assert got.stopped
            assert 1 + sum(got.accepted) == i + 1
    (cut,) = decode(small, Oracle(known, [7]), [prompt], 9, {truth[10]})
    assert cut.tokens == truth[:9]
    assert not cut.stopped


@pytest.mark.parametrize("tree", [None, 10])
def test_rows_that_end_give_their_place_to_waiting_sequences(small, tree):
    """Texts of very different lengths: what a row held before must not be seen by what follows."""
    texts, drafter = prompts(7, (9, 30, 4, 1)), drafter_for(small)
    stop = set(range(0, VOCAB, 7))
    expected = decode(small, Nobody(), texts, 24, stop)
    assert len({len(g.tokens) for g in expected}) > 3
    alone = [speculative_decode(small, drafter, p, 24, stop, tree=tree) for p in texts]
    finished = []
    for batch in (3, 20):
        proposer = DrafterProposer(small, drafter, tree=tree)
        got = decode(
            small, proposer, texts, 24, stop, batch=batch, finished=lambda: finished.append(1)
        )
        for ours, one, truth in zip(got, alone, expected):
            assert (ours.tokens, ours.stopped) == (truth.tokens, truth.stopped)
            assert ours.accepted == one.accepted
    assert len(finished) == 2 * len(texts)


def test_what_is_recorded(small):
    texts, drafter = prompts(3), drafter_for(small)
    embedding, head = small.vocabulary()
    for tree in (None, 12):
        proposer = DrafterProposer(small, drafter, tree=tree, record=True)
        for prompt, got in zip(texts, decode(small, proposer, texts, 16, batch=2)):
            assert len(got.ranks) == len(got.expected) == len(got.accepted)
            # Step by step again from the whole text: features, then the block at its anchor.
            text, known = [*prompt, *got.tokens], len(prompt) + 1
            features = small.forward_with_taps(
                torch.tensor([text]), torch.arange(len(text))[None], tf.DynamicCache()
            )[1]
            for accepted, ranks, expected in zip(got.accepted, got.ranks, got.expected):
                a = known - 1
                block = embedding[[text[a], drafter.config.mask_token_id]]
                layouts = drafter.layouts(torch.tensor([0]), torch.tensor([a]), a)
                with torch.no_grad():
                    hidden = drafter(
                        block,
                        drafter.encode_context(features[:a]),
                        torch.arange(a, a + 8),
                        torch.arange(a),
                        layouts,
                    )
                    log_probs = (hidden[1:] @ head.T).log_softmax(-1)
                for slot, (rank, token) in enumerate(zip(ranks, text[known:])):
                    true = int((log_probs[slot] > log_probs[slot, token]).sum())
                    assert rank == min(true, RECORDED)
                if tree is None:
                    best = log_probs.max(-1).values
                    assert expected == pytest.approx(float(best.cumsum(0).exp().sum()), rel=1e-4)
                else:
                    assert 0 < expected < 7
                known += accepted
                if known > len(text):
                    break


class StubModel:
    """A target without transformers' own reads of scalars: random logits, hooks fed by hand."""

    def __init__(self, target: Target) -> None:
        self.config, self.target = target.model.config, target

    def __call__(self, input_ids, logits_to_keep=0, **keywords):
        capture = self.target._local.capture
        cache = keywords["cache" if "cache" in keywords else "past_key_values"]
        R, n = input_ids.shape
        for layer in range(self.target.num_layers):
            cache.update(torch.zeros(R, 1, n, 2), torch.zeros(R, 1, n, 2), layer)
        for tap in self.target.tap_ids:
            capture.take(tap, torch.randn(R * n, self.target.hidden_size))
        output = type("Output", (), {})()
        output.logits = torch.randn(R, n, VOCAB)
        return output


@pytest.mark.parametrize(("tree", "waits_per_step"), [(None, 1), (12, 2)])
def test_waits_for_the_device(small, monkeypatch, tree, waits_per_step):
    texts, drafter = prompts(3), drafter_for(small)
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
    monkeypatch.setattr(small, "model", StubModel(small))
    got = decode(small, DrafterProposer(small, drafter, tree=tree), texts, 20, batch=3)
    steps = max(len(g.accepted) for g in got)
    assert waits == waits_per_step * steps + 3  # and one for the first token of each


def test_prompt_lookup_proposes_what_followed_the_longest_match():
    def lookup(text):
        proposer = PromptLookup(5, torch.device("cpu"))
        proposer.open(1, 100)
        proposer.start(0, text[:2])
        proposer.observe([text[2:]], None, None)
        proposal = proposer.propose(torch.tensor(text[-1:]))
        assert proposal.counts == [len(proposal.ids[0])]
        return proposal.ids[0].tolist()

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
    assert got.tokens == plain_decode(target, prompts(1)[0], 100).tokens
    assert got.accepted[-5:] == [8] * 5


def test_until_stop():
    assert until_stop([1, 2, 3], {2}) == [1, 2]
    assert until_stop([1, 2, 3], ()) == [1, 2, 3]


class TestHybrid:
    """A target with linear-attention layers, whose state a token cannot be taken out of."""

    def test_chains_give_its_text(self):
        target = Target(tiny_hybrid(), tap_ids=(1, 3))
        texts, count = prompts(3), 12
        truths = [theirs(target, prompt, count + 8) for prompt in texts]
        known = {tuple(p): t for p, t in zip(texts, truths)}
        oracle = Oracle(known, [0, 7, 3, 1, 6], features=True)
        for proposer in (Nobody(), DrafterProposer(target, drafter_for(target)), oracle):
            got = decode(target, proposer, texts, count, batch=2)
            assert [g.tokens for g in got] == [truth[:count] for truth in truths]
        for prompt, pieces in oracle.features.items():
            features = torch.cat(pieces)
            text = torch.tensor([[*prompt, *known[prompt]][: len(features)]])
            places = torch.arange(len(features))[None]
            cache = tf.DynamicCache(config=target.model.config)
            _, expected = target.forward_with_taps(text, places, cache)
            torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-3)

    def test_sampled(self):
        target = Target(tiny_hybrid(), tap_ids=(1, 3))
        prompt = prompts(1)[0]
        (truth,) = plain(target, [prompt], 30, SAMPLED)
        for right in ([7], [2, 0, 5]):
            oracle = Oracle({tuple(prompt): truth}, right)
            (got,) = decode(target, oracle, [prompt], 22, sampling=SAMPLED)
            assert got.tokens == truth[:22]

    def test_trees_are_refused(self):
        target = Target(tiny_hybrid(), tap_ids=(1, 3))
        with pytest.raises(UserError, match=r"'linear_attention'\] layers.*chains, not trees"):
            speculative_decode(target, drafter_for(target), [5], 4, tree=8)

    def test_a_state_that_several_tokens_do_not_continue_is_read_one_by_one(
        self, monkeypatch, caplog
    ):
        """As transformers 5.6 forgets it; the text is the same."""
        target, prompt = Target(tiny_hybrid(), tap_ids=(1, 3)), prompts(1)[0]
        (truth,) = plain(target, [prompt], 20)
        caplog.clear()
        forget(target, monkeypatch, lambda n: n > 1)
        oracle = Oracle({tuple(prompt): truth}, [2, 0, 5], features=True)
        (got,) = decode(target, oracle, [prompt], 12)
        assert got.tokens == truth[:12]
        assert len(oracle.features[tuple(prompt)]) > 1
        assert [r.getMessage().count("read one by one") for r in caplog.records] == [1]

    def test_a_state_that_no_token_continues_is_refused(self, monkeypatch):
        target = Target(tiny_hybrid(), tap_ids=(1, 3))
        forget(target, monkeypatch, lambda n: True)
        with pytest.raises(UserError, match=r"state of its \['linear_attention'\] layers token by"):
            plain_decode(target, [5, 6], 4)


def forget(target, monkeypatch, when):
    """A continuation by n tokens starts from nothing, `when(n)`."""
    real, name = target.model.forward, cache_argument(target.model)

    def forgetful(input_ids, **keywords):
        cache = keywords[name]
        if cache.get_seq_length() and when(input_ids.shape[1]):
            keywords[name] = tf.DynamicCache(config=target.model.config)
        return real(input_ids, **keywords)

    monkeypatch.setattr(target.model, "forward", forgetful)


def test_errors(small):
    with pytest.raises(UserError, match="empty prompt"):
        plain_decode(small, [], 4)
    with pytest.raises(UserError, match="exceed the target's 4096 positions"):
        speculative_decode(small, drafter_for(small), [5] * 4080, 10)
    with pytest.raises(UserError, match="expected 1 taps × 64, got 2"):
        speculative_decode(small, drafter_for(small, target_layer_ids=(1,)), [5], 10)
    with pytest.raises(UserError, match="batch 0: expected at least 1"):
        decode(small, Nobody(), [[5]], 4, batch=0)
    with pytest.raises(UserError, match="tree of 0 guesses"):
        speculative_decode(small, drafter_for(small), [5], 10, tree=0)
    assert decode(small, Nobody(), [], 4) == []
    flex = Target(tiny_model(num_hidden_layers=2))
    flex.model.config._attn_implementation_internal = "flex_attention"
    reader = AttentionReader(flex, 2, 20)
    reader.lengths = [3, 4]
    with pytest.raises(UserError, match="flex_attention attention, which takes no mask"):
        reader.read(torch.ones(2, 1, dtype=torch.int64), [(), ()], taps=False)
