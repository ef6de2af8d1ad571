"""What a long command has finished is kept, whatever ends it."""

from __future__ import annotations

from dflash_ext.data.journal import Journal


def test_a_journal_with_nothing_in_it_binds_nobody(tmp_path):
    path = tmp_path / "j"
    for content in (b"", b'{"settings": {"a": 1}}\n', b'{"settings": {"a"'):
        path.write_bytes(content)
        journal = Journal(path, {"a": 2})
        journal.add("k", value=1)
        journal.close()
        again = Journal(path, {"a": 2})
        assert (len(again), again["k"]["value"]) == (1, 1)
        again.close()
    path.write_bytes(path.read_bytes() + b'{"key": "l", "value": 2}\n{"key": "m"')
    journal = Journal(path, {"a": 2})
    assert ("k" in journal, "l" in journal, "m" in journal) == (True, True, False)
    journal.add("n", value=3)
    assert (journal["l"]["value"], journal["n"]["value"]) == (2, 3)
    journal.close(remove=True)
    assert not path.exists()


def test_a_damaged_line_costs_its_own_work_and_no_other(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, {"a": 1})
    for key in "klm":
        journal.add(key, value=key)
    journal.close()
    path.write_bytes(path.read_bytes().replace(b'{"key": "l"', b'{"key\xff "l"'))
    journal = Journal(path, {"a": 1})
    assert ["k" in journal, "l" in journal, "m" in journal] == [True, False, True]
    journal.add("l", value="again")
    journal.close()
    journal = Journal(path, {"a": 1})
    assert [journal[key]["value"] for key in "klm"] == ["k", "again", "m"]
    journal.close()
