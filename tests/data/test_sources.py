"""Documents: found in the same order everywhere, decoded without a change, or named as broken."""

import hashlib
import os

import pytest

from data import DataError, sources
from data.sources import documents


def texts(source, **options) -> dict[str, str]:
    return {name: text for name, text in documents(str(source), **options)}


# ---------------------------------------------------------------------------------- files, folders


def test_a_file_is_one_document_to_the_byte(tmp_path):
    path = tmp_path / "my text.txt"
    path.write_bytes("a\r\nb\n\0é😀\ufeff".encode())
    assert texts(path) == {str(path): "a\r\nb\n\0é😀\ufeff"}
    assert texts(path) == texts(path)  # calling again starts again


def test_a_bad_byte_is_named_and_can_be_replaced(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 noir")
    with pytest.raises(DataError, match=r"latin\.txt: byte 0xe9 at offset 3 .*--errors=replace"):
        texts(path)
    assert texts(path, errors="replace") == {str(path): "caf\ufffd noir"}


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder.*nothing\.txt.*stdlib, shakespeare"):
        texts(tmp_path / "nothing.txt")


def test_a_folder_gives_its_texts_by_name(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "a/b/c.md", ".hidden", ".git/config", "a/.x/y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"PNG" + bytes(10))
    (tmp_path / "late.txt").write_bytes(b"x" * 8192 + b"\0")  # text, as far as the probe looks
    skipped = {"empty": 0, "binary": 0}
    names = list(texts(tmp_path, skipped=skipped))
    assert names == ["a.txt", "a/b/c.md", "a/z.txt", "b.txt", "late.txt"]
    assert skipped == {"empty": 1, "binary": 1}


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_to_folders_and_pipes_are_left_alone(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/one.txt").write_text("one", encoding="utf-8")
    (tmp_path / "texts/loop").symlink_to(tmp_path)
    (tmp_path / "texts/broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "texts/link.txt").symlink_to(tmp_path / "texts/one.txt")
    os.mkfifo(tmp_path / "texts/pipe")
    assert texts(tmp_path / "texts") == {"link.txt": "one", "one.txt": "one"}


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    scandir = os.scandir

    def locked(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(PermissionError, match="locked"):
        texts(tmp_path)


def test_a_keyword_wins_unless_the_path_is_spelled_out(tmp_path, monkeypatch):
    (tmp_path / "stdlib").write_text("mine", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert texts("./stdlib") == {"./stdlib": "mine"}
    assert next(documents("stdlib"))[1] != "mine"


# ------------------------------------------------------------------------------------------ stdlib


def test_stdlib_is_sorted_source_without_tests():
    found = texts("stdlib")
    assert list(found) == sorted(found) and "argparse.py" in found and "json/decoder.py" in found
    assert sum(map(len, found.values())) > 2_000_000
    for name in found:
        assert name.endswith(".py")
        assert not sources.STDLIB_EXCLUDED & set(name.split("/"))


# ------------------------------------------------------------------------------- tiny shakespeare


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A stand-in for the file on GitHub, with a hash that fits."""
    path, content = tmp_path / "served.txt", b"First Citizen:\n"
    path.write_bytes(content)
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", path.as_uri())
    monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    return path


def test_shakespeare_is_downloaded_once(served, data_folder):
    assert texts("shakespeare") == {"shakespeare": "First Citizen:\n"}
    assert [p.name for p in (data_folder / ".cache").iterdir()] == ["tinyshakespeare.txt"]
    served.unlink()
    assert texts("shakespeare") == {"shakespeare": "First Citizen:\n"}


def test_a_changed_download_is_not_kept(served, data_folder):
    served.write_bytes(b"404: Not Found")
    with pytest.raises(DataError, match=r"served\.txt \(14 bytes\) has SHA-256 .*expected.*try"):
        texts("shakespeare")
    assert not (data_folder / ".cache").exists()


def test_a_damaged_copy_is_not_used(served, data_folder):
    texts("shakespeare")
    (data_folder / ".cache/tinyshakespeare.txt").write_bytes(b"First")
    assert texts("shakespeare") == {"shakespeare": "First Citizen:\n"}  # downloaded again
    (data_folder / ".cache/tinyshakespeare.txt").write_bytes(b"First")
    served.unlink()
    with pytest.raises(DataError, match="could not download"):
        texts("shakespeare")


def test_without_network_a_local_path_is_asked_for(served):
    served.unlink()
    with pytest.raises(DataError, match="could not download .*give a local copy"):
        texts("shakespeare")


@pytest.mark.parametrize("files", [{}, {"os.py": "x = 1\n"}, None],
                         ids=["empty", "small", "absent"])
def test_a_standard_library_that_is_not_there_is_named(files, tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))
    with pytest.raises(DataError, match="zipped, absent or stripped") as error:
        list(documents("stdlib"))
    assert "\n" not in str(error.value) and "--dataset=my.txt" in str(error.value)
