"""What a run is given: stores that fit it, and rows prepared into a cache under the right key."""

from __future__ import annotations

import pytest
from data_fixtures import CHATML, LLAMA3, make_tokenizer
from prepare_cases import GOOD, TOKENIZER, make, write

from dflash_ext.data import prepared
from dflash_ext.data.prepared import finished_store, prepared_store
from dflash_ext.data.rows import ChatOptions
from dflash_ext.errors import UserError


def test_another_way_of_making_samples_needs_another_store(tmp_path):
    """Requirement 4, for a store with a name; `prepared_store` has it in the name."""
    source = write(tmp_path / "d.jsonl", GOOD)
    make(tmp_path / "s", source)
    others = {
        "max_length 128, now 64": {"options": ChatOptions(max_length=64)},
        "supervise all, now last": {"options": ChatOptions(max_length=128, supervise="last")},
        "another template": {"tokenizer": make_tokenizer(LLAMA3)},
    }
    for message, other in others.items():
        with pytest.raises(UserError, match=f"was prepared otherwise .*{message}"):
            make(tmp_path / "s", source, **other)
    with pytest.raises(UserError, match="max_length 1"):
        make(tmp_path / "s", source, options=ChatOptions(max_length=1))


def test_cache_key_covers_what_changes_the_result(tmp_path, monkeypatch):
    data, changed = write(tmp_path / "d.jsonl", GOOD), make_tokenizer(CHATML)
    changed.add_tokens(["question"])

    def path(data=data, tokenizer=TOKENIZER, **options):
        options = {"max_length": 64, **options}
        store, report = prepared_store(data, tokenizer, root=tmp_path / "cache", **options)
        assert report.samples == len(store)
        return store.path

    paths = [
        path(),
        path(data=write(tmp_path / "e.jsonl", GOOD[1:])),
        path(tokenizer=changed),
        path(tokenizer=make_tokenizer(LLAMA3)),
        path(max_length=65),
    ]
    assert path() == paths[0]
    assert path(data=write(tmp_path / "copy.jsonl", GOOD)) == paths[0]  # bytes, not names
    monkeypatch.setattr(prepared, "code_version", lambda *files: "another")
    paths.append(path())
    assert len(set(paths)) == len(paths)


def test_a_finished_store_has_to_fit_the_run(tmp_path):
    made, _ = make(tmp_path / "s", write(tmp_path / "d.jsonl", GOOD))

    def opened(template=CHATML, max_length=128):
        tokenizer = make_tokenizer(template)
        return finished_store(tmp_path / "s", lambda: tokenizer, max_length=max_length)

    assert opened().identity == made.identity
    longest = int(made.lengths.max())
    opened(max_length=longest)
    with pytest.raises(UserError, match=rf"a sample of {longest} tokens, max_length is"):
        opened(max_length=longest - 1)
    with pytest.raises(UserError, match="prepared with another template than the target's"):
        opened(LLAMA3)
    finished_store(tmp_path / "s", None, max_length=128)  # a target without a tokenizer


def test_a_file_that_cannot_be_read(tmp_path):
    for name, message in (("none.jsonl", "No such file"), ("x.jsonl", "Input/output error")):
        if name == "x.jsonl":
            (tmp_path / name).symlink_to("/proc/self/mem")  # opens, does not read
        with pytest.raises(UserError, match=rf"cannot read .*{name}: {message}"):
            prepared_store(str(tmp_path / name), TOKENIZER, max_length=64, root=tmp_path / "cache")
