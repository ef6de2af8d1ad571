"""Taps against the unmodified model, for every family; padding, threads, vocabulary, mask token."""

from __future__ import annotations

import itertools
import threading
import weakref

import pytest
import torch
import transformers as tf
from tiny_targets import (  # noqa: F401
    COMMON,
    FAMILIES,
    READ_FAMILIES,
    VOCAB,
    one_thread,
    tiny_model,
    tiny_tokenizer,
)

from dflash_ext.batch import PackedBatch
from dflash_ext.errors import UserError
from dflash_ext.mask_token import resolve_mask_token_id
from dflash_ext.plan import plan_subbatches
from dflash_ext.startup import release
from dflash_ext.taps import check_tap_ids, default_tap_ids
from dflash_ext.target import Target
from dflash_ext.target_loading import decoder_layers

LENGTHS = (11, 3, 19, 12, 1)


def packed(lengths=LENGTHS, seed=0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    documents = [
        (torch.randint(3, VOCAB, (n,), generator=generator), torch.ones(n, dtype=torch.bool))
        for n in lengths
    ]
    return PackedBatch.from_documents(documents, range(len(lengths)))


def fused_layers(target: Target) -> int:
    """Layers of a packed forward that are ours; 0 if it is padded."""
    return 0 if target.acceleration is None else len(target.acceleration.fused_layers)


def true_taps(model, batch: PackedBatch) -> torch.Tensor:
    """[layers, T, Ht]: every document alone; last layer by a hook of the test's own."""
    per_document = []
    last: list[torch.Tensor] = []
    layers = model.model.layers
    handle = layers[-1].register_forward_hook(
        lambda m, a, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        for ids in batch.input_ids.split(batch.lengths().tolist()):
            states = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
            assert len(states) == len(layers) + 1
            outputs = [*states[1:-1], last.pop()]
            per_document.append(torch.cat(outputs))
    handle.remove()
    return torch.cat(per_document, dim=1)


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("family", READ_FAMILIES)
def test_taps_equal_the_unmodified_model(family, accelerated):
    model, batch = tiny_model(family, head_dim=64), packed()
    truth = true_taps(model, batch)
    target = Target(model, tap_ids=(0, 3, 2), accelerated=accelerated)
    assert fused_layers(target) == 4 * accelerated
    got = target.features(batch)
    got.verify(batch, (0, 3, 2), target.hidden_size)
    assert got.features.dtype == torch.float32
    expected = torch.cat([truth[0], truth[3], truth[2]], dim=-1)
    torch.testing.assert_close(got.features, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", READ_FAMILIES)
def test_bf16_taps_are_as_near_as_the_model_s_own(family):
    batch = packed()
    truth = true_taps(tiny_model(family, head_dim=64), batch)
    model = tiny_model(family, head_dim=64).bfloat16()
    own = true_taps(model, batch).float()
    target = Target(model, tap_ids=(1, 3))
    assert fused_layers(target) == 4
    got = target.features(batch).features
    assert got.dtype == torch.bfloat16
    expected = torch.cat([truth[1], truth[3]], -1)
    error_own = (torch.cat([own[1], own[3]], -1) - expected).norm()
    assert (got.float() - expected).norm() <= 2 * error_own + 1e-3 * expected.norm()


def test_last_tap_is_before_the_final_norm():
    model, batch = tiny_model(), packed()
    model.model.norm.weight.data.fill_(10.0)
    truth = true_taps(model, batch)[3]
    got = Target(model, tap_ids=(3,)).features(batch).features
    torch.testing.assert_close(got, truth, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(got, model.model.norm(got), atol=0.1)


def test_nothing_after_the_last_tap_runs():
    model = tiny_model()
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: ran.append(name))
    Target(model, tap_ids=(0, 2)).features(packed())
    assert "model.layers.1" in ran
    assert not {"model.layers.3", "model.norm", "lm_head"} & set(ran)
    ran.clear()
    model(torch.tensor([[3, 4]]))  # and the model itself is as before
    assert {"model.layers.3", "model.norm", "lm_head"} <= set(ran)


def test_contents_of_padding_and_of_batch_mates_do_not_matter():
    target = Target(tiny_model("mistral"), tap_ids=(0, 3))
    alone = [target.features(packed((9,), seed=s)).features for s in range(4)]
    documents = [packed((9,), seed=s) for s in range(4)]
    mates = [packed((10,), seed=9), packed((30,), seed=9)]
    together = PackedBatch.from_documents(
        [(b.input_ids, b.loss_mask) for b in [*documents, *mates]], range(6)
    )
    torch.testing.assert_close(
        target.features(together).features[:36], torch.cat(alone), rtol=2e-4, atol=2e-4
    )


def test_threads_do_not_mix():
    target = Target(tiny_model())
    batches = [packed(seed=s) for s in range(6)]
    serial = [target.features(b).features for b in batches]
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(len(batches))

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(5):
            results[i] = target.features(batches[i]).features

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(serial):
        assert torch.equal(results[i], expected)


def test_features_can_be_trained_on_and_hold_no_graph():
    target = Target(tiny_model())
    features = target.features(packed()).features
    assert not features.requires_grad
    weight = torch.zeros(1, features.shape[1], requires_grad=True)
    (features @ weight.T).sum().backward()
    assert weight.grad is not None
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def test_a_target_that_is_let_go_is_gone():
    """A drafter's rank keeps two matrices of it, and needs the space."""
    target = Target(tiny_model(), tap_ids=(0, 2))
    target.features(packed())
    kept, gone = target.vocabulary(), weakref.ref(target.model.model.layers[1].mlp.up_proj.weight)
    del target
    release(torch.device("cpu"))
    assert gone() is None
    assert kept.head.shape[0] == VOCAB


@pytest.mark.parametrize("overhead", [0, 5, 40])
def test_plan_subbatches_is_optimal(overhead):
    def cost(plan, lengths):
        return sum(len(docs) * max(lengths[d] for d in docs) + overhead for docs in plan)

    generator = torch.Generator().manual_seed(overhead)
    for n in (1, 2, 3, 5, 7):
        lengths = torch.randint(1, 60, (n,), generator=generator).tolist()
        plan = plan_subbatches(lengths, overhead)
        assert sorted(itertools.chain(*plan)) == list(range(n))
        assert all(lengths[docs[0]] == max(lengths[d] for d in docs) for docs in plan)
        order = sorted(range(n), key=lambda i: -lengths[i])
        every_split = (
            [order[a:b] for a, b in itertools.pairwise((0, *cuts, n))]
            for r in range(n)
            for cuts in itertools.combinations(range(1, n), r)
        )
        most = sum(lengths)
        allowed = [p for p in every_split if all(cost([d], lengths) - overhead <= most for d in p)]
        assert cost(plan, lengths) == min(cost(p, lengths) for p in allowed)
        assert cost(plan, lengths) <= sum(lengths) + overhead * n
    assert plan_subbatches([], overhead) == []


def test_default_tap_ids_are_those_of_published_drafters():
    assert default_tap_ids(36) == (1, 9, 17, 25, 33)
    assert default_tap_ids(64) == (1, 16, 31, 46, 61)
    assert default_tap_ids(30) == (1, 8, 14, 20, 27)
    for n in range(1, 40):
        for K in (1, 3, 5):
            ids = check_tap_ids(default_tap_ids(n, K), n)
            assert len(ids) == min(K, n)
            assert list(ids) == sorted(ids)


def test_tap_ids_are_validated():
    with pytest.raises(
        UserError, match=r"expected distinct ids from 0 to 3 .*4 decoder.* got \[4\]"
    ):
        Target(tiny_model(), tap_ids=(1, 4))
    for wrong in ((), (1, 1), (-1,)):
        with pytest.raises(UserError, match="expected distinct ids from 0 to 3"):
            Target(tiny_model(), tap_ids=wrong)


def test_fp16_is_refused():
    with pytest.raises(UserError, match="bf16 or fp32"):
        Target(tiny_model().half())
    with pytest.raises(UserError, match="not supported: use one of"):
        Target.load("anywhere", dtype="fp16")
    with pytest.raises(UserError, match="not supported: use one of"):
        Target.load("anywhere", dtype=torch.float16)


def test_text_layers_are_found_inside_a_multimodal_wrapper():
    text = tf.Gemma3TextConfig(**{**COMMON, "head_dim": 16, "sliding_window": 7, "pad_token_id": 0})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = tf.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    torch.manual_seed(0)
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    layers = decoder_layers(model, 4)
    assert type(layers[0]).__name__ == "Gemma3DecoderLayer"
    target = Target(model, tap_ids=(1, 3))
    batch = packed((6, 9))
    batch = PackedBatch(
        batch.input_ids % 80 + 3, batch.loss_mask, batch.doc_starts, batch.sample_ids
    )
    got = target.features(batch).features
    captured: list[torch.Tensor] = []
    layers[1].register_forward_hook(
        lambda m, a, out: captured.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(batch.input_ids[None, :6])
    torch.testing.assert_close(got[:6, :64], captured[0].reshape(6, 64), rtol=2e-4, atol=2e-4)
    with pytest.raises(UserError, match="no list of 9 decoder layers"):
        decoder_layers(model, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_vocabulary_is_what_the_model_reads_and_predicts(family):
    model = tiny_model(family)
    vocabulary = Target(model).vocabulary()
    ids = torch.arange(VOCAB)
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True)
        torch.testing.assert_close(vocabulary.embedding[ids], states.hidden_states[0][0])
        logits = states.hidden_states[-1][0] @ vocabulary.head.T
    torch.testing.assert_close(logits, states.logits[0], rtol=1e-4, atol=1e-4)
    assert not vocabulary.embedding.requires_grad
    tied = model.config.tie_word_embeddings and family != "gemma3"  # Gemma's embedding scales
    assert (vocabulary.embedding.data_ptr() == vocabulary.head.data_ptr()) == tied


@pytest.mark.parametrize("padded", ["embedding", "head"])
def test_a_vocabulary_padded_on_one_side_still_pairs(padded):
    model = tiny_model(tie_word_embeddings=False)
    big = torch.nn.Linear(64, VOCAB + 32, bias=False).weight.detach()
    if padded == "head":
        big[:VOCAB] = model.lm_head.weight
        big[VOCAB:] = 1e3  # must never win an argmax: the model cannot read such a token
        model.lm_head.weight = torch.nn.Parameter(big)
    else:
        big[:VOCAB] = model.model.embed_tokens.weight
        model.model.embed_tokens.weight = torch.nn.Parameter(big)
    target = Target(model)
    vocabulary = target.vocabulary()
    assert target.vocab_size == vocabulary.head.shape[0] == VOCAB
    assert vocabulary.embedding.shape[0] == VOCAB + 32 * (padded == "embedding")
    ids, places = torch.tensor([[3, 4, 5]]), torch.arange(3)[None]
    logits, features = target.forward_with_taps(ids, places, tf.DynamicCache())
    assert logits.shape == (1, 3, VOCAB)
    assert features is not None
    assert features.shape == (3, 4 * 64)


def test_head_with_bias_is_refused():
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(64, VOCAB)
    with pytest.raises(UserError, match="lm_head without bias"):
        Target(model).vocabulary()


class TestMaskToken:
    config = tf.LlamaConfig(**COMMON)

    def test_explicit(self):
        assert resolve_mask_token_id(17, None, self.config, VOCAB) == 17
        for wrong in (0, 1, 2):
            with pytest.raises(UserError, match="is a pad, eos or bos token"):
                resolve_mask_token_id(wrong, None, self.config, VOCAB)
        for wrong in (-1, VOCAB):
            with pytest.raises(UserError, match="is no row of the embedding"):
                resolve_mask_token_id(wrong, None, self.config, VOCAB)

    def test_known_for_the_family(self):
        qwen3 = tf.Qwen3Config(vocab_size=151936)
        assert resolve_mask_token_id(None, None, qwen3, 151936) == 151669
        with pytest.raises(UserError, match="no mask token found"):  # tiny: the row is not there
            resolve_mask_token_id(None, None, qwen3, VOCAB)

    def test_tokenizer_mask_then_reserved_then_padding(self, caplog):
        caplog.set_level("INFO", logger="dflash_ext")
        tokenizer = tiny_tokenizer(("<|reserved_special_token_0|>", "<m>"))
        tokenizer.mask_token = "<m>"
        assert resolve_mask_token_id(None, tokenizer, self.config, VOCAB) == 4
        assert "id 4 '<m>' (the tokenizer's mask token)" in caplog.text
        for name in ("<empty_output>", "<unused0>", "[unused1]", "<|reserved_special_token_7|>"):
            tokenizer = tiny_tokenizer(("<other>", name))
            assert resolve_mask_token_id(None, tokenizer, self.config, VOCAB) == 4
            assert repr(name) in caplog.text
        assert resolve_mask_token_id(None, tiny_tokenizer(), self.config, VOCAB) == VOCAB - 8
        with pytest.raises(UserError, match="give mask_token_id"):
            resolve_mask_token_id(None, tiny_tokenizer(), self.config, VOCAB - 8)

    def test_eos_lists_of_the_config_count(self):
        config = tf.LlamaConfig(**{**COMMON, "eos_token_id": [2, 5]})
        with pytest.raises(UserError, match="pad, eos or bos"):
            resolve_mask_token_id(5, None, config, VOCAB)
        assert Target(tiny_model(eos_token_id=[2, 5])).mask_token_id(6) == 6
