"""Every kind of source gives the same rows; whatever is wrong with a file is one line."""

from __future__ import annotations

import datetime
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.data import blocks
from dflash_ext.data.formats import parse_json
from dflash_ext.data.readers import expand
from dflash_ext.data.rows import SkipRow
from dflash_ext.data.store import StoreWriter
from dflash_ext.errors import UserError

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"q {i} ä漢🙂"},
            {"role": "assistant", "content": "a"},
        ]
    }
    for i in range(7)
]
TABLE = pa.Table.from_pylist(ROWS)
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def write_zstd(path, data):
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(data)


def write_source(folder, kind):
    """The name of a source that holds ROWS."""
    path = folder / f"rows.{kind}"
    if kind in ("jsonl", "ndjson"):
        path.write_bytes(LINES)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(LINES[:100]) + gzip.compress(LINES[100:]))  # two members
    elif kind == "jsonl.zst":
        write_zstd(path, LINES)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    elif kind == "parquet":
        pq.write_table(TABLE, path, row_group_size=3)
    elif kind == "arrow":
        with pa.ipc.new_file(str(path), TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=3)
    elif kind == "stream.arrow":
        with pa.ipc.new_stream(str(path), TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=3)
    elif kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    elif kind == "hub":
        path.mkdir()
        (path / "train.jsonl").write_bytes(LINES)
        return f"hf:{path}"
    return str(path)


KINDS = ("jsonl", "ndjson", "jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet", "arrow")
KINDS += ("stream.arrow", "saved", "hub")


def read(*names):
    """(number, row) of every row: parsed, or its SkipRow's reason."""
    return [
        (number, row.reason if isinstance(row, SkipRow) else json.loads(row))
        for source in expand(names)
        for block in source.read()
        for number, row in block.rows
    ]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_rows(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 2)
    name = write_source(tmp_path, kind)
    assert read(name) == list(enumerate(ROWS, 1))
    (source,) = expand([name])
    done = [block.done for block in source.read()]
    assert done == sorted(done)
    assert 0 < done[-1] <= 1
    assert expand([name])[0].digest() == source.digest()


def test_several_sources_each_once_in_order(tmp_path):
    for name in "cab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "note.txt").write_text("no data")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.jsonl").write_text('{"text": "d"}\n')

    def texts(*names):
        return "".join(row["text"] for _, row in read(*names))

    assert texts(str(tmp_path / "*.jsonl")) == "abc"
    assert texts(str(tmp_path / "c.jsonl"), str(tmp_path / "*")) == "cab"
    assert texts(str(tmp_path)) == "abcd"
    assert texts(str(tmp_path / "**" / "*.jsonl")) == "abcd"
    with StoreWriter(tmp_path / "store") as writer:  # its own report is no data
        writer.append([1, 2], [True, True])
    (tmp_path / "store" / "report.json").write_text("{}")
    (tmp_path / ".hidden.jsonl").write_text('{"text": "x"}\n')
    datasets.Dataset.from_list([{"text": "e"}]).save_to_disk(str(tmp_path / "saved"))
    assert texts(str(tmp_path)) == "abcde"
    assert texts(str(tmp_path / "**")) == "abcde"
    with pytest.raises(UserError, match="store is a token store, not data"):
        expand([str(tmp_path / "store")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", r"cannot read .*nothing\.jsonl: No such file; .*hf:owner/name"),
        ("*.jsonl", r"\*\.jsonl matches no data file; expected \.jsonl"),
        ("empty", "holds no data file"),
        ("x.txt", r"x\.txt: unknown kind of file; expected \.jsonl"),
        ("x.parquet.gz", "unknown kind of file"),
    ],
)
def test_names_that_stand_for_nothing(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    for file in ("x.txt", "x.parquet.gz"):
        (tmp_path / file).write_text("x")
    with pytest.raises(UserError, match=message):
        expand([str(tmp_path / name)])
    with pytest.raises(UserError, match="no source was named"):
        expand([])


def test_a_data_set_that_cannot_be_loaded(tmp_path):
    with pytest.raises(UserError, match=r"cannot load hf:/nowhere") as caught:
        read("hf:/nowhere/at-all")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"has the splits train, not 'test'"):
        read(write_source(tmp_path, "hub") + "@test")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "arrow", "stream.arrow"])
def test_a_file_cut_short_is_one_line(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    write_source(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=rf"rows\.{kind}.*") as caught:
        read(str(path))
    assert "\n" not in str(caught.value)


def test_rows_before_the_damage_come_first(tmp_path):
    many = b"".join(json.dumps({"text": f"{i:0100}"}).encode() + b"\n" for i in range(5000))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(many)[:-1000])
    (source,) = expand([str(tmp_path / "d.jsonl.gz")])
    blocks, numbers = source.read(), []

    def collect():
        for block in blocks:
            numbers.extend(number for number, _ in block.rows)

    with pytest.raises(UserError, match=r"cut short after row (\d+)") as caught:
        collect()
    count = int(str(caught.value).split("after row ")[1].split()[0])
    assert 1000 < count < 5000
    assert numbers == list(range(1, count + 1))


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst", "d.parquet", "d.arrow"])
def test_a_file_of_another_kind_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(b"neither nor" * 10)
    with pytest.raises(UserError, match=r"d\..* is damaged|cannot read .*d\.") as caught:
        read(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_file_that_opens_but_does_not_read(tmp_path):
    (tmp_path / "d.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"cannot read .*d\.jsonl: Input/output error"):
        read(str(tmp_path / "d.jsonl"))


def test_a_huge_row_is_skipped_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_ROW_BYTES", 1000)
    huge = json.dumps({"text": "x" * 5000})
    fits = json.dumps({"text": "x" * (1000 - len('{"text": ""}'))})
    assert len(fits) == 1000
    lines = [fits, huge, '{"text": "b"}', huge]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    found = read(str(tmp_path / "d.jsonl"))
    assert [row if isinstance(row, str) else row["text"][:1] for _, row in found] == [
        "x",
        "row is too large",
        "b",
        "row is too large",
    ]
    pq.write_table(pa.table({"text": ["a", "x" * 5000, "b"]}), tmp_path / "d.parquet")
    assert [row for _, row in read(str(tmp_path / "d.parquet"))] == [
        {"text": "a"},
        "row is too large",
        {"text": "b"},
    ]
    monkeypatch.setattr(blocks, "MAX_ROW_BYTES", 1 << 20)
    (tmp_path / "d.json").write_text(f"[{json.dumps({'text': 'x' * (5 << 20)})}]")
    with pytest.raises(UserError, match=r"row 1 of the JSON array: is larger than"):
        read(str(tmp_path / "d.json"))


def test_columns_that_matter_are_read_and_missing_ones_named(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "id": [1], "when": [2]}), tmp_path / "d.parquet")
    assert read(str(tmp_path / "d.parquet")) == [(1, {"text": "a"})]
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "e.parquet")
    with pytest.raises(
        UserError, match=r"e\.parquet has the columns id, body; expected one of mess"
    ):
        read(str(tmp_path / "e.parquet"))


def test_arrow_strings_that_are_not_utf8(tmp_path):
    broken = pa.array([b"fine", b"\xff\xfe", b"too"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": broken}), tmp_path / "d.parquet")
    rows = [row for _, row in read(str(tmp_path / "d.parquet"))]
    assert rows == [{"text": "fine"}, "text is not UTF-8", {"text": "too"}]


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff", "[]", " [ ] "])
def test_nothing_in_it(tmp_path, text):
    for name in ("d.json", "d.jsonl"):
        (tmp_path / name).write_text(text)
    assert read(str(tmp_path / "d.json")) == []


@pytest.mark.parametrize(
    "text", ["[", '[{"text": "a"}', '[{"text": "a"}, {"te', "[1, }", "[" * 10**5]
)
def test_damaged_array(tmp_path, text):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(UserError, match=r"d\.json: row \d+ of the JSON array: ") as caught:
        read(str(tmp_path / "d.json"))
    assert "\n" not in str(caught.value)


def test_what_follows_an_array_is_not_lost_silently(tmp_path):
    (tmp_path / "d.json").write_text('[{"text": "a"}] \n[{"text": "b"}]')
    (source,) = expand([str(tmp_path / "d.json")])
    found = source.read()
    assert next(found).rows == [(1, b'{"text": "a"}')]
    with pytest.raises(UserError, match=r"more behind the end of its JSON array, after row 1"):
        next(found)


def test_columns_of_bytes_are_text_and_those_of_dates_are_not(tmp_path):
    columns = {"text": [b"caf\xc3\xa9", b"\xff\xfe"], "system": [None, None]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    rows = [
        row for s in expand([str(tmp_path / "d.parquet")]) for b in s.read() for _, row in b.rows
    ]
    assert json.loads(rows[0])["text"] == "café"
    with pytest.raises(SkipRow, match="not UTF-8"):
        parse_json(rows[1])
    pq.write_table(pa.table({"text": [datetime.date(2026, 1, 1)]}), tmp_path / "e.parquet")
    assert read(str(tmp_path / "e.parquet")) == [
        (1, "a column is neither text, number, truth nor list")
    ]


def test_digests_are_of_bytes_and_of_how_they_are_read(tmp_path):
    def digest(name):
        (source,) = expand([str(tmp_path / name)])
        return source.digest()

    for name in ("a.json", "b.json", "c.jsonl"):
        (tmp_path / name).write_text('[{"text": "a"}, {"text": "b"}]')
    assert digest("a.json") == digest("b.json") != digest("c.jsonl")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(saved))
    before = digest("saved")
    (file,) = saved.glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"q 3", b"q 4"))  # behind the back of `datasets`
    assert digest("saved") != before


def test_a_data_set_of_several_configs(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "train.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "d" / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: one/*.jsonl\n"
        "- config_name: two\n  data_files: two/*.jsonl\n---\n"
    )
    name = f"hf:{tmp_path / 'd'}"
    for config in ("one", "two"):
        assert read(f"{name}:{config}@train") == [(1, {"text": config})]
    with pytest.raises(UserError, match=r"cannot load hf:.*[Cc]onfig"):
        read(name)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.lists(VALUES, max_size=12), st.sampled_from([None, 1]), st.booleans())
def test_any_values_as_array_and_as_lines(tmp_path_factory, values, indent, ascii_only):
    folder = tmp_path_factory.mktemp("r")
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    (folder / "a.json").write_bytes(text.encode())
    assert read(str(folder / "a.json")) == list(enumerate(values, 1))
    lines = "\r\n".join(json.dumps(v, ensure_ascii=ascii_only) for v in values)
    (folder / "l.jsonl").write_bytes(lines.encode())
    assert read(str(folder / "l.jsonl")) == list(enumerate(values, 1))
    (folder / "l.json").write_bytes(b'{"not": "an array"}\n' + lines.encode())
    assert [row for _, row in read(str(folder / "l.json"))][1:] == values


@settings(max_examples=60)
@given(st.binary(max_size=200), st.sampled_from(["d.jsonl", "d.json", "d.jsonl.gz", "d.jsonl.zst"]))
def test_any_bytes_are_rows_or_one_line(tmp_path_factory, data, name):
    path = tmp_path_factory.mktemp("r") / name
    path.write_bytes(data)
    try:
        for source in expand([str(path)]):
            for block in source.read():
                assert all(isinstance(row, (bytes, SkipRow)) for _, row in block.rows)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
