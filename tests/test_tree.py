"""Trees against plain recursion; the heaviest prefixes are held against enumeration in metrics."""

from __future__ import annotations

import random

from dflash_ext.tree import ancestors, depths, heaviest_prefixes, is_chain, walk


def test_ancestors_and_depths_follow_the_parents():
    draw = random.Random(0)
    for n in (0, 1, 5, 40):
        parents = [draw.randrange(i) for i in range(1, n + 1)]
        seen, levels = ancestors(parents), depths(parents)
        for node in range(n + 1):
            path = [node]
            while path[-1]:
                path.append(parents[path[-1] - 1])
            assert {i for i in range(n + 1) if seen[node, i]} == set(path)
            assert levels[node] == len(path) - 1
    assert is_chain(range(5))
    assert is_chain(())
    assert not is_chain([0, 0])


def test_walk_goes_down_while_a_child_is_what_was_said():
    #        0 ── 1 (7) ── 3 (8)      after 0 comes 7, after node 1 comes 8, after node 3 comes 5
    #        └─── 2 (6) ── 4 (8)
    parents, read = [0, 0, 1, 2], [1, 7, 6, 8, 8]
    assert walk(parents, read, [7, 8, 8, 5, 5]) == [0, 1, 3]
    assert walk(parents, read, [6, 8, 8, 5, 5]) == [0, 2, 4]
    assert walk(parents, read, [6, 8, 9, 5, 5]) == [0, 2]
    assert walk(parents, read, [5, 7, 7, 7, 7]) == [0]
    assert walk([0, 0, 1], [1, 7, 7, 8], [7, 8, 8, 8]) == [0, 1, 3]  # a token twice: the first
    assert walk([], [4], [4]) == [0]


def test_nodes_of_a_tree_are_prefix_closed_and_nested():
    log_probs = [[-0.1, -2.0, -3.0], [-0.5, -0.9], [-0.2, -1.7, -4.0]]
    nodes = list(heaviest_prefixes(log_probs, 100))
    assert len(nodes) == 3 + 3 * 2 + 3 * 2 * 3  # all there are
    assert nodes[:4] == list(heaviest_prefixes(log_probs, 4))
    scores = [node.score for node in nodes]
    assert scores == sorted(scores, reverse=True)
    for i, node in enumerate(nodes, 1):
        assert node.parent < i
        above = 0.0 if node.parent == 0 else nodes[node.parent - 1].score
        assert abs(node.score - above - log_probs[node.depth - 1][node.rank]) < 1e-12
    assert list(heaviest_prefixes([], 4)) == []
