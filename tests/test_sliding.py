"""A drafter with sliding layers whose window is shorter than the documents, from end to end."""

from __future__ import annotations

import json

import pytest
import torch
from reference_drafter import reference_hidden
from test_generate import drafter_for
from test_train import config_of, world  # noqa: F401
from tiny_targets import VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext.batch import PackedBatch
from dflash_ext.config import DrafterOptions, EvalOptions, TrainConfig
from dflash_ext.drafting import Drafting
from dflash_ext.export import load_export, main, save_export
from dflash_ext.export_check import StoredDrafter
from dflash_ext.target import Target
from dflash_ext.train import train
from dflash_ext.trainer import Trainer

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW, B = 6, 4


@pytest.mark.parametrize("kinds", [(*[SLIDING] * 4, FULL), (SLIDING, SLIDING)])
def test_training_export_and_generation_give_the_same_logits(tmp_path, kinds):
    """Two packed documents of 40 and 31 tokens; where every layer slides, the trainer leaves out
    the context that no block sees."""
    target = Target(tiny_model(tie_word_embeddings=False), tap_ids=(0, 2, 3))
    trained = drafter_for(
        target, block_size=B, num_layers=len(kinds), layer_types=kinds, sliding_window=WINDOW
    )
    torch.manual_seed(5)
    for parameter in trained.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    folder = save_export(trained, tmp_path / "e", target=target)
    drafter, stored = load_export(folder), StoredDrafter(folder)

    texts = [torch.randint(3, VOCAB - 8, (n,)) for n in (40, 31)]
    batch = PackedBatch.from_documents([(text, torch.ones_like(text)) for text in texts], [0, 1])
    anchors = torch.tensor([0, 1, 5, 6, 7, 25, 38, 40, 46, 60])  # of the packed sequence
    trainer = Trainer(target.vocabulary(), drafter, TrainConfig())
    blocks = trainer.blocks(batch, anchors)
    features = target.features(batch)
    _, head = target.vocabulary()
    with torch.no_grad():
        inputs = trainer.inputs(features, batch, blocks)
        training = (trainer.hidden(inputs, supervised=False) @ head.T).view(-1, B, VOCAB)

    places = [(0, a) if a < 40 else (1, a - 40) for a in anchors.tolist()]
    documents = [0] * 40 + [1] * 31
    ids = torch.full((len(places), B), drafter.config.mask_token_id)
    ids[:, 0] = batch.input_ids[anchors]
    embeds = trainer.embedding[ids]
    hidden = reference_hidden(
        {name: stored.stored(name) for name in stored.names},
        json.loads((folder / "config.json").read_text()),
        features.features.double(),
        documents,
        [*range(40), *range(31)],
        embeds.flatten(0, 1).double(),
        [document for document, _ in places],
        [place for _, place in places],
    )
    truth = (hidden @ head.T.double()).view(-1, B, VOCAB)
    largest = truth.abs().max()
    assert (training - truth).abs().max() < 5e-6 * largest
    # The window is what this test is about: without it the logits are others.
    wide = {**stored.config, "sliding_window": 1000}
    stored.config, narrow = wide, stored.config
    mine = features.features[:40]
    far = stored.hidden(mine, [25], embeds[5:6])
    assert (far @ head.T - truth[5]).abs().max() > 1e-2 * largest
    stored.config = narrow

    for document, text in enumerate(texts):
        taps = features.features[[i for i, of in enumerate(documents) if of == document]]
        drafting = Drafting(drafter, 1, len(text), device="cpu", dtype=torch.float32)
        for n, (of, place) in enumerate(places):
            if of == document:
                new = torch.arange(drafting.lengths[0], place)
                drafting.extend(taps[new], torch.zeros_like(new), new, [len(new)])
                got = drafting.draft(embeds[n, :2]) @ head.T
                assert (got - truth[n]).abs().max() < 5e-6 * largest, (document, place)


def test_a_run_with_a_sliding_drafter_trains_exports_converts_and_decodes(world, tmp_path, capsys):  # noqa: F811
    options = EvalOptions(
        prompts=(str(world / "prompts.txt"),),
        prompts_per_set=2,
        max_new_tokens=12,
        held_out_prompts=False,
        every=0,
    )
    run = tmp_path / "run"
    shape = DrafterOptions(layer_types=("2xsliding", "full"), sliding_window=WINDOW, block_size=B)
    assert train(config_of(world, run, drafter=shape, eval=options, steps=6)) == 0
    config = json.loads((run / "export" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (WINDOW, True)
    assert "is_causal" not in config
    rows = json.loads((run / "results.json").read_text())["rows"]
    assert [row["equals greedy"] for row in rows] == ["2/2"]

    other = tmp_path / "speculators"
    assert main([str(run), "--layout", "speculators", "--out", str(other)]) == 0
    for folder in (run, other):
        assert main(["--check", str(folder), "--target", str(world / "target")]) == 0
    a, b = load_export(run / "export"), load_export(other)
    assert a.config == b.config
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters()):
        assert torch.equal(x, y), name
    # And on it goes, from the other layout.
    again = DrafterOptions(init=str(other))
    quick = EvalOptions(prompts_per_set=0, every=0)
    assert train(config_of(world, tmp_path / "on", drafter=again, eval=quick, steps=2)) == 0
    assert load_export(tmp_path / "on" / "export").config == a.config
