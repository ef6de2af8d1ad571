"""What the target says at the nodes of trees, beside other sequences, is what it says alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tiny_targets import FAMILIES, VOCAB, one_thread, tiny_hybrid, tiny_model  # noqa: F401

from dflash_ext.reader import AttentionReader, StateReader, open_reader, takes_trees
from dflash_ext.target import Target

CLOSE = {"rtol": 3e-4, "atol": 3e-4}


def truth(target: Target, text: list[int]):
    """Logits [t, V] and taps [t, K*Ht] of a whole text, without a cache."""
    with torch.no_grad():
        ids, states = torch.tensor([text]), {}
        hooks = [
            layer.register_forward_hook(
                lambda _m, _a, out, i=i: states.update(
                    {i: out[0] if isinstance(out, tuple) else out}
                )
            )
            for i, layer in enumerate(target.model.model.layers)
        ]
        logits = target.model(ids, use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
    return logits, torch.cat([states[i][0] for i in target.tap_ids], -1)


def path_to(parents: list[int], node: int) -> list[int]:
    found = [node]
    while found[0]:
        found.insert(0, parents[found[0] - 1])
    return found


@pytest.mark.parametrize(
    ("family", "chains"), [*itertools.product(FAMILIES, (True, False)), ("hybrid", True)]
)
def test_every_node_is_read_as_if_its_path_were_the_text(family, chains):
    model = tiny_hybrid() if family == "hybrid" else tiny_model(family)
    target = Target(model, tap_ids=(1, 3))
    reader = open_reader(target, 3, 80)
    assert isinstance(reader, StateReader if family == "hybrid" else AttentionReader)
    assert takes_trees(target) == (family != "hybrid")
    draw = random.Random(1)
    texts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (3, 17, 9)]
    for row, text in enumerate(texts):
        logits, features = reader.start(row, text, taps=True)
        all_logits, all_features = truth(target, text)
        torch.testing.assert_close(logits, all_logits[-1:], **CLOSE)
        torch.testing.assert_close(features, all_features, **CLOSE)
    for step in range(4):
        n = draw.randrange(1, 9)
        ids = [[draw.randrange(VOCAB) for _ in range(n)] for _ in texts]
        parents = [[i - 1 if chains else draw.randrange(i) for i in range(1, n)] for _ in texts]
        logits, features = reader.read(torch.tensor(ids), parents, taps=True)
        assert logits.shape == (len(texts), n, VOCAB)
        features = features.view(len(texts), n, -1)
        paths = []
        for row, text in enumerate(texts):
            for node in range(n):
                path = path_to(parents[row], node)
                if node in (n - 1, n // 2):
                    whole = [*text, *(ids[row][i] for i in path)]
                    true_logits, true_features = truth(target, whole)
                    torch.testing.assert_close(logits[row, node], true_logits[-1], **CLOSE)
                    torch.testing.assert_close(features[row, node], true_features[-1], **CLOSE)
            paths.append(path_to(parents[row], draw.randrange(n)))
        before = [len(text) for text in texts]
        kept = reader.keep(paths)
        for row, path in enumerate(paths):
            texts[row] += [ids[row][i] for i in path]
        assert kept.counts == [len(path) for path in paths]
        assert kept.nodes.tolist() == [node for path in paths for node in path]
        places = [begin + i for begin, path in zip(before, paths) for i in range(len(path))]
        assert kept.places.tolist() == places
        assert reader.lengths == [len(text) for text in texts]
        if step == 1:  # a row ends; another is given to a new, shorter text
            reader.select([2, 0])
            texts = [texts[2], [5, 4, 3, 2]]
            reader.start(1, texts[1], taps=False)
