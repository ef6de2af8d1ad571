from __future__ import annotations

import pytest
import torch
from data_fixtures import CHATML, make_tokenizer, make_word_tokenizer, tiny_model
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, MistralForCausalLM

from dflash_ext.data import decoding, synthesis
from dflash_ext.data.decoding import sample_top_p
from dflash_ext.data.synthesis import TOP_P, synthesize, synthesized_store, template_frame
from dflash_ext.errors import UserError

MAX_PROMPT, MAX_ANSWER = 10, 12
OPTIONS = {"max_prompt_tokens": MAX_PROMPT, "max_answer_tokens": MAX_ANSWER, "batch_size": 24}
# kind -> class, bias that makes turns end now and then (and some answers not), overrides
KINDS = {
    "llama": (LlamaForCausalLM, 5.8, {}),
    # The cache of a sliding layer forgets: windows shorter than the conversations.
    "mistral": (MistralForCausalLM, 6.0, {"sliding_window": 8}),
    "gemma3": (
        Gemma3ForCausalLM,
        0.28,
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Matrices this small only wait for each other on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setup(kind="llama", end_bias=None):
    tokenizer = make_word_tokenizer()
    cls, bias, overrides = KINDS[kind]
    bias = bias if end_bias is None else end_bias
    return tiny_model(tokenizer, cls, end_bias=bias, **overrides), tokenizer


@torch.no_grad()
def naive_answer(model, prompt, stops):
    """One row, no cache, everything computed again for each token."""
    ids = list(prompt)
    for _ in range(MAX_ANSWER):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_models_own_greedy_ones(kind):
    model, tokenizer = setup(kind)
    stops = [tokenizer.eos_token_id]
    samples = synthesize(model, tokenizer, count=30, **OPTIONS)
    assert len(samples) == 30
    ended = 0
    for ids, mask in samples:
        start = mask.index(True)
        answer = ids[start:]
        assert mask == [False] * start + [True] * len(answer)
        assert answer == naive_answer(model, ids[:start], stops)
        assert answer[-1] in stops or len(answer) == MAX_ANSWER
        ended += answer[-1] in stops
    assert 0 < ended < 30, "the case should have ended and cut answers"


def test_prompts_are_what_the_template_gives():
    model, tokenizer = setup()
    samples = synthesize(model, tokenizer, count=30, **OPTIONS)
    special = set(tokenizer.all_special_ids)
    texts = set()
    for ids, mask in samples:
        prompt = ids[: mask.index(True)]
        # "<|im_start|>user ... <|im_end|><|im_start|>assistant"; white space is no token here
        user = prompt[2:-3]
        assert 1 <= len(user) <= MAX_PROMPT
        assert not special.intersection(user)
        messages = [{"role": "user", "content": tokenizer.decode(user)}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer(text, add_special_tokens=False).input_ids == prompt
        texts.add(tokenizer.decode(user))
    assert len(texts) == 30


def test_seed_decides():
    model, tokenizer = setup()
    first = synthesize(model, tokenizer, count=10, seed=1, **OPTIONS)
    assert first == synthesize(model, tokenizer, count=10, seed=1, **OPTIONS)
    assert first != synthesize(model, tokenizer, count=10, seed=2, **OPTIONS)


def test_rows_that_finish_early_are_dropped_and_nothing_changes(monkeypatch):
    model, tokenizer = setup()
    widths = []
    plain = synthesis.forward

    def watched(model, ids, cache):
        widths.append(ids.shape[0])
        return plain(model, ids, cache)

    monkeypatch.setattr(synthesis, "forward", watched)
    dropped = synthesize(model, tokenizer, count=20, **OPTIONS)
    assert min(widths[1:]) < max(widths)
    # The draws depend on the rows present, so compare the answers: truth is the naive decode.
    for ids, mask in dropped:
        start = mask.index(True)
        assert ids[start:] == naive_answer(model, ids[:start], [tokenizer.eos_token_id])


def test_caches_that_cannot_drop_or_repeat_rows(monkeypatch):
    """A layer kind without those methods (a recurrent state) is used as it is."""
    model, tokenizer = setup()

    class Plain(decoding.DynamicLayer):
        @property
        def batch_select_indices(self):
            raise AttributeError

        @property
        def batch_repeat_interleave(self):
            raise AttributeError

    class PlainCache(decoding.DynamicCache):
        def __init__(self, config):
            super().__init__(config=config)
            self.layers = [Plain() for _ in self.layers]

    monkeypatch.setattr(decoding, "DynamicCache", PlainCache)
    for ids, mask in synthesize(model, tokenizer, count=5, **OPTIONS):
        start = mask.index(True)
        assert ids[start:] == naive_answer(model, ids[:start], [tokenizer.eos_token_id])


@pytest.mark.parametrize("top_p", [TOP_P, 0.5, 0.2, 1.0])
def test_nucleus_draws_have_the_right_frequencies(top_p):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -2.0, -3.0, -6.0])
    probs = logits.softmax(-1)
    # The definition, by sorting: the fewest most probable tokens that reach top_p.
    size = min(len(probs), int((probs.cumsum(-1) < top_p).sum()) + 1)
    expected = torch.cat([probs[:size], torch.zeros(len(probs) - size)])
    expected /= expected.sum()
    rows = 200_000
    generator = torch.Generator().manual_seed(0)
    drawn = sample_top_p(logits.expand(rows, -1), generator, top_p)
    found = drawn.bincount(minlength=len(probs)) / rows
    assert found[size:].sum() == 0
    # five standard deviations of a frequency
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / rows).sqrt()).all()
    # A token that is the nucleus alone is always drawn, however small the noise of the others.
    certain = torch.tensor([[10.0, 0.0, 0.0, 0.0, 0.0]]).expand(1000, -1)
    assert (sample_top_p(certain, generator, min(top_p, 0.99)) == 0).all()


def test_progress_rises_to_the_count_and_training_mode_is_kept():
    model, tokenizer = setup()
    model.train()
    seen = []
    synthesize(model, tokenizer, count=30, progress=lambda *at: seen.append(at), **OPTIONS)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (30, 30)
    assert model.training


def test_frame_of_a_template():
    tokenizer = make_tokenizer(CHATML)
    model = tiny_model(tokenizer)
    frame = template_frame(model, tokenizer)
    assert tokenizer.decode(frame.prefix) == "<|im_start|>user\n"
    assert tokenizer.decode([frame.user_end]) == "<|im_end|>"
    assert tokenizer.decode(frame.suffix) == "\n<|im_start|>assistant\n"
    assert frame.stops == [tokenizer.eos_token_id]
    model.generation_config.eos_token_id = [0, tokenizer.eos_token_id]
    assert template_frame(model, tokenizer).stops == [0, tokenizer.eos_token_id]


def test_errors():
    model, tokenizer = setup(end_bias=-50.0)  # no turn ever ends
    with pytest.raises(UserError, match=r"only 0 of .* prompts the target wrote were usable"):
        synthesize(model, tokenizer, count=1, **OPTIONS)
    with pytest.raises(UserError, match="count 0: expected at least 1"):
        synthesize(model, tokenizer, count=0)
    tokenizer.chat_template = "nothing of the message"
    with pytest.raises(UserError, match="does not show a user's text"):
        synthesize(model, tokenizer, count=1)
    tokenizer.chat_template = "{{ messages[0]['content'] }} <|im_end|> assistant"
    with pytest.raises(UserError, match="does not show a user's text after some of its own"):
        synthesize(model, tokenizer, count=1)
    tokenizer.chat_template = "{{ raise_exception('not today') }}"
    with pytest.raises(UserError, match=r"cannot synthesise prompts: template refused.*not today"):
        synthesize(model, tokenizer, count=1)
    tokenizer.chat_template = "user {{ messages[-1]['content'] }} w1"
    with pytest.raises(UserError, match="cannot synthesise prompts: template has no end-of-turn"):
        synthesize(model, tokenizer, count=1)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        synthesize(model, tokenizer, count=1)


def test_a_prompt_the_template_refuses_is_left_out():
    model, tokenizer = setup()
    word = "w7"

    def asked():
        return [
            tokenizer.decode([i for i, answer in zip(ids, mask) if not answer]).split()
            for ids, mask in synthesize(model, tokenizer, count=60, **OPTIONS)
        ]

    assert any(word in prompt for prompt in asked())
    tokenizer.chat_template = (
        "{% if 'w7' in messages[0]['content'].split() %}{{ raise_exception('no') }}{% endif %}"
        + CHATML
    )
    assert not any(word in prompt for prompt in asked())


def test_store_is_cached_by_everything_that_matters(tmp_path, monkeypatch):
    model, tokenizer = setup()

    def make(**changes):
        options = {**OPTIONS, "count": 6, **changes}
        return synthesized_store(model, tokenizer, root=tmp_path, **options)

    store = make()
    samples = synthesize(model, tokenizer, count=6, **OPTIONS)
    for i, (ids, mask) in enumerate(samples):
        got_ids, got_mask = store.sample(i)
        assert (got_ids.tolist(), got_mask.tolist()) == (ids, mask)
        assert store.prompt(i) == ids[: mask.index(True)]
    paths = {store.path, make(seed=1).path, make(count=5).path, make(max_answer_tokens=11).path}
    assert len(paths) == 4
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert make().path not in paths
    with torch.no_grad():
        model.model.norm.weight[0] -= 1
    monkeypatch.setattr(synthesis, "synthesize", None)  # must not be needed any more
    assert make().path == store.path
