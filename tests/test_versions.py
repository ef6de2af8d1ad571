"""The script that runs the tests under several torch and transformers, and the table of it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from dflash_ext.bench.tables import versions_table
from dflash_ext.errors import UserError

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "versions.py"


@pytest.fixture(scope="module")
def versions():
    spec = importlib.util.spec_from_file_location("versions", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_every_test_it_names_exists(versions):
    text = {p.stem.removeprefix("test_"): p.read_text() for p in (ROOT / "tests").glob("test_*.py")}
    for test in versions.TESTS:
        file, _, name = test.partition("::")
        assert f"def {name}(" in text[file.removesuffix(".py")] if name else test in text, test
    for part in versions.LEFT_OUT:
        assert any(re.search(rf"def test_\w*{part}", text[t]) for t in versions.TESTS if t in text)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="good"/>
<testcase classname="tests.test_a" name="bad[1]"><failure message="no"/></testcase>
<testcase classname="tests.test_b" name="broken"><error message="import"/></testcase>
<testcase classname="tests.test_b" name="left"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_b" name="left2"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(versions, tmp_path):
    (tmp_path / "r.xml").write_text(REPORT)
    assert versions.outcome(tmp_path / "r.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 2,
        "failing": ["tests.test_a::bad[1]", "tests.test_b::broken"],
        "why skipped": ["no GPU"],
    }


def test_what_is_imported_first(versions, tmp_path):
    """The tree, then what a pair brings; nothing of the caller's."""
    path = versions.environment([tmp_path / "a", tmp_path / "b"])["PYTHONPATH"].split(os.pathsep)
    assert path == [str(ROOT), str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_command_that_fails_says_why(versions):
    assert versions.command([sys.executable, "-c", "print(7)"]) == "7\n"
    with pytest.raises(UserError, match="no such torch"):
        versions.command([sys.executable, "-c", "raise SystemExit('no such torch')"])


def test_versions_are_sorted_as_numbers(versions):
    order = ["2.8.0+cu128", "2.13.0+cpu", "2.14.0.dev20261130", "2.14.1"]
    mixed = [order[i] for i in (3, 1, 0, 2)]
    assert sorted(mixed, key=versions.numbers) == order


def pair(**changes):
    names = ("torch", "transformers", "tokenizers", "huggingface_hub")
    values = dict.fromkeys(names, "1.0") | {"passed": 5, "failed": 0, "skipped": 1}
    return {**values, "failing": [], "md5": "abc", **changes}


def test_the_table_says_what_failed():
    text = versions_table({"pairs": [pair(), pair(torch="2.8.0", failed=1, failing=["t::x"])]})
    assert "| 2.8.0 | 1.0 | 1.0 | 1.0 | 5 | 1 | 1 |" in text
    assert "Failed under torch 2.8.0, transformers 1.0: t::x." in text
    assert text.endswith("MD5 of the extension in all of them: abc.")
    assert "Failed" not in versions_table({"pairs": [pair()]})
