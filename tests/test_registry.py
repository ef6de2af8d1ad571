from __future__ import annotations

import multiprocessing
import os
import stat

import pytest
from data_fixtures import make_wheel

from dflash_ext.data import registry
from dflash_ext.errors import UserError

NAME = "dflash-test-package"


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A folder of wheels as the only registry, an empty cache, and one pinned package."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _, sha256 = make_wheel(wheels, NAME, "1.0", {"pkg/data.txt": b"hello", "../escape": b"x"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(registry.PACKAGES, NAME, registry.Package(NAME, "1.0", sha256))
    return wheels


def test_fetch_verifies_caches_and_mends(local):
    wheel = registry.fetch(NAME)
    assert registry.read_member(wheel, "pkg/data.txt") == b"hello"
    for file in local.iterdir():
        file.unlink()
    assert registry.fetch(NAME) == wheel  # out of the cache, no registry needed
    make_wheel(local, NAME, "1.0", {"pkg/data.txt": b"other"})
    wheel.write_bytes(wheel.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"sha256 is not the pinned .* it was not used"):
        registry.fetch(NAME)  # the cached file is damaged, the registry's is another one


def test_nothing_is_unpacked_outside(local, tmp_path):
    (wheel,) = local.iterdir()
    target = tmp_path / "out" / "model.bin"
    target.parent.mkdir()
    registry._extract_member(wheel, "../escape", target)
    assert target.read_bytes() == b"x"
    assert not (tmp_path / "escape").exists()
    assert not (wheel.parent / "escape").exists()


def test_messages_are_one_line(local, monkeypatch):
    for file in local.iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"cannot download dflash-test-package==1\.0") as caught:
        registry.fetch(NAME)
    assert "\n" not in str(caught.value)
    assert "PIP_FIND_LINKS" in str(caught.value)
    with pytest.raises(UserError, match="unknown package 'nope', expected one of"):
        registry.fetch("nope")
    monkeypatch.setattr(registry.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="pip failed"):
        registry.fetch(NAME)


def test_unreadable_wheels_are_user_errors(local):
    (wheel,) = local.iterdir()
    with pytest.raises(UserError, match="cannot read pkg/none"):
        registry.read_member(wheel, "pkg/none")
    wheel.write_bytes(b"not a zip")
    with pytest.raises(UserError, match=r"cannot read pkg/data\.txt"):
        registry.read_member(wheel, "pkg/data.txt")


def _fetch_in_process(environment, package):
    os.environ.update(environment)
    registry.PACKAGES[NAME] = package
    return str(registry.fetch(NAME))


def test_racing_processes_get_the_same_file(local):
    same = (dict(os.environ), registry.PACKAGES[NAME])
    # Not forks of this process, whose threads may hold what a child would wait for.
    with multiprocessing.get_context("forkserver").Pool(4) as pool:
        assert len(set(pool.starmap(_fetch_in_process, [same] * 4, chunksize=1))) == 1
    files = [p.name for p in (registry.cache_dir() / "wheels").iterdir() if p.suffix != ".lock"]
    assert files == [f"{NAME}-1.0.whl"]


def test_the_cache_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "a" / "b"))
    path = registry.cache_dir()
    assert path == tmp_path / "a" / "b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    monkeypatch.delenv("DFLASH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / ".cache" / "dflash_ext"
    home.mkdir(parents=True, mode=0o755)
    assert registry.cache_dir() == home
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_directory_in_use_for_more_keeps_its_mode(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    assert registry.cache_dir() == tmp_path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="not a directory of yours"):
        registry.cache_dir()


def test_an_unusable_cache_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set DFLASH_CACHE"):
        registry.cache_dir()


def test_conversion_must_give_the_same_weights_back(tmp_path):
    """The check behind `smollm2_dir`, on a model saved right and then on one saved wrong."""
    import torch
    from data_fixtures import CHATML, make_tokenizer, tiny_model

    tokenizer = make_tokenizer(CHATML)
    model = tiny_model(tokenizer).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    registry._check_conversion(model, tokenizer, tmp_path)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        registry._check_conversion(model, tokenizer, tmp_path)
    with torch.no_grad():
        model.model.norm.weight[0] -= 1
    tokenizer.chat_template = CHATML + " "
    with pytest.raises(UserError, match="tokenizer differs"):
        registry._check_conversion(model, tokenizer, tmp_path)
