"""kit/files.py: whole or absent, sealed to the last bit, read within bounds, not through links."""

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kit import files
from kit.errors import UserError

VALUE = {"a": 1, "tiny": 1e-7, "é": [None, 1.5, "\ud800"], "b": {"x": True, "y": ""}}


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "x.json"


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        files.read_json(path)
    message = str(error.value)
    assert str(path) in message and len(message.splitlines()) == 1 and len(message) < 400
    return message


def fail(error: BaseException):
    def call(*args, **kwargs):
        raise error

    return call


# -------------------------------------------------------------------------------------- the seal


def test_what_is_written_is_read(path):
    files.write_json(path, VALUE)
    back = files.read_json(path)
    assert {k: v for k, v in back.items() if k not in ("format", "seal")} == VALUE
    assert back["format"] == files.FORMAT == 2 and list(back)[0] == "format"
    assert list(back)[-1] == "seal"
    files.write_json(path, back | {"a": 2})  # what was read can be written: the seal is made anew
    assert files.read_json(path)["a"] == 2


def test_the_seal_is_the_sha_256_of_all_else(path):
    files.write_json(path, VALUE)
    seal = json.loads(path.read_text())["seal"]
    rest = json.dumps(VALUE | {"format": 2}, sort_keys=True)
    assert seal == hashlib.sha256(rest.encode()).hexdigest()


def test_no_single_flipped_bit_goes_unnoticed(path):
    """All of them: also where the JSON still means the same, as 1e-07 and 1E-07."""
    files.write_json(path, {"a": 1, "tiny": 1e-7, "é": "x"})
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(UserError, match="x.json: damaged"):
            files.read_json(path)
    path.write_bytes(data)
    assert files.read_json(path)["a"] == 1


def test_no_truncation_and_no_addition_goes_unnoticed(path):
    files.write_json(path, VALUE)
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        refused(path)
        path.write_bytes(data[n:] if n else data + data)
        refused(path)
    for more in (b" ", b"\n", b"\0", b"{}"):
        path.write_bytes(data + more)
        refused(path)
        path.write_bytes(more + data)
        refused(path)
    path.write_bytes(data.replace(b"\n", b"\r\n"))
    refused(path)


def test_a_value_that_was_changed_by_hand_is_refused(path):
    files.write_json(path, VALUE)
    text = path.read_text()
    for old, new in (('"a": 1', '"a": 2'), ('"a": 1', '"a": 1.0'), ('"format": 2', '"format": 1'),
                     ('"format": 2', '"format": 3'), ('"y": ""', '"y": "", "y": ""')):
        assert old in text
        path.write_text(text.replace(old, new))
        refused(path)
    value = json.loads(text)
    path.write_text(json.dumps(value))  # the same, laid out otherwise
    refused(path)
    del value["seal"]
    path.write_text(files.to_text(value))  # format 2 is sealed
    refused(path)


def test_files_of_the_first_format_had_no_seal(path):
    for text in ('{"format": 1}', '{"format":1,"a":[1,2]}', '{"a": 1,\n "format": 1}\n'):
        path.write_text(text)
        assert files.read_json(path) == json.loads(text)


def test_a_state_of_the_first_format_was_sealed_and_still_counts(path):
    """{"format": 1, ..., "seal"}, the hash without the format."""
    seal = hashlib.sha256(json.dumps({"step": 3}, sort_keys=True).encode()).hexdigest()
    text = files.to_text({"format": 1, "step": 3, "seal": seal})
    path.write_text(text)
    assert files.read_json(path)["step"] == 3
    path.write_text(text.replace('"step": 3', '"step": 4'))
    refused(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"format": 3}', "[" * 100_000,
                                  '{"format": 2}', '{"format": "1"}', "\ufeff{}", '{"a":' * 100_000,
                                  '{"format": 1, "a": ' + "9" * 5000 + "}",
                                  '{"format": 1, "seal": null}'])
def test_json_of_others_is_refused(path, text):
    path.write_text(text, encoding="utf-8")
    assert "x.json: damaged, or not of this version" in refused(path)


@pytest.mark.parametrize("data", [b"\xff", b"\0" * 100, '{"format": 1, "a": "é"}'.encode("latin-1"),
                                  '{"format": 1}'.encode("utf-16"), os.urandom(1000)])
def test_bytes_that_are_no_text_are_refused(path, data):
    path.write_bytes(data)
    assert "x.json: damaged" in refused(path)


# ------------------------------------------------------------------------------------ the bounds


def test_a_file_that_is_too_large_is_refused_unread(path, monkeypatch):
    with path.open("wb") as f:
        f.truncate(1 << 34)  # a hole: it takes no room
    began = time.perf_counter()
    assert "larger than 64 MiB" in refused(path)
    assert time.perf_counter() - began < 1
    monkeypatch.setattr(files, "LARGEST_JSON", 50)
    path.write_text('{"format": 1, "a": "' + "x" * 28 + '"}')
    assert path.stat().st_size == 50 and files.read_json(path)
    path.write_text('{"format": 1, "a": "' + "x" * 29 + '"}')
    assert "larger" in refused(path)


def test_only_a_plain_file_is_read(path, tmp_path):
    """Not a link, even to a sound file; not a folder, a pipe, a socket or a device without end."""
    files.write_json(tmp_path / "sound.json", VALUE)

    def both() -> None:
        assert "a plain file belongs here" in refused(path)
        for read in (files.digest, files.size_of):
            with pytest.raises(UserError, match="plain file"):
                read(path)

    path.mkdir()
    both()
    path.rmdir()
    targets = ["sound.json", str(tmp_path / "sound.json"), "nowhere", "x.json", ".", os.devnull]
    for target in targets + ["/dev/zero"] * Path("/dev/zero").exists():
        path.symlink_to(target)
        both()
        path.unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(path)  # opening it would wait for ever
        both()
        path.unlink()
    if hasattr(socket, "AF_UNIX") and len(str(path)) < 100:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(path))
            both()


def test_a_file_that_is_not_there_is_told_from_a_damaged_one(path):
    for read in (files.read_json, files.digest, files.size_of):
        with pytest.raises(FileNotFoundError):
            read(path)


def test_digest_is_the_sha_256_of_the_bytes(path):
    for data in (b"", b"abc", os.urandom((1 << 20) + 3)):
        path.write_bytes(data)
        assert files.digest(path) == hashlib.sha256(data).hexdigest()
        assert files.size_of(path) == len(data)


# --------------------------------------------------------------------------------------- replacing


def test_a_file_is_replaced_when_the_block_has_ended_well(path):
    path.write_text("old")
    with files.replacing(path) as aside:
        assert aside.parent == path.parent and aside.name.startswith(".tmp-")
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("no"), OSError(28, "No space left on device"),
                                   KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("old", ["old", None])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(path, error, old):
    if old:
        path.write_text(old)
    for after in (True, False):  # before or after something was written
        with pytest.raises(type(error)) as raised, files.replacing(path) as aside:
            if after:
                aside.write_text("half")
            raise error
        assert raised.value is error
        assert [p.read_text() for p in path.parent.iterdir()] == ([old] if old else [])


@pytest.mark.parametrize("name", ["fsync", "replace", "open"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(path, name, monkeypatch):
    files.write_json(path, {"a": 1})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            files.write_json(path, {"a": 2})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_value_that_is_no_json_leaves_the_old_file(path):
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert files.read_json(path)["a"] == 1 and list(path.parent.iterdir()) == [path]


def test_a_killed_process_leaves_the_old_file_or_the_new_one(path, monkeypatch):
    files.write_json(path, {"a": 1})
    for name, at, expected in (("fsync", 0, 1), ("replace", 0, 1), ("fsync", 1, 2)):
        real, calls = getattr(os, name), []
        files.write_json(path, {"a": 1})

        def call(*args, real=real, calls=calls, at=at):
            calls.append(args)
            if len(calls) > at:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            patch.setattr(Path, "unlink", lambda *a, **k: None)  # the dead clear nothing away
            with pytest.raises(Killed):
                files.write_json(path, {"a": 2})
        assert files.read_json(path)["a"] == expected
        for left in path.parent.glob(".tmp-*"):
            left.unlink()


def test_what_is_replaced_is_on_the_disk_before_and_its_name_after(path, monkeypatch):
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("replace"), replace(a, b)))
    files.write_text(path, "new")
    assert seen == [path.stat().st_ino, "replace", path.parent.stat().st_ino]


def test_nothing_is_written_through_a_link(path, tmp_path):
    """Neither one at the place of the temporary file nor one at the place of the file itself."""
    (tmp_path / "elsewhere").mkdir()
    theirs = tmp_path / "elsewhere" / "theirs.txt"
    theirs.write_text("theirs")
    with files.replacing(path) as aside:
        aside.write_text("x")
    for link in (aside, path):
        link.unlink(missing_ok=True)
        link.symlink_to(theirs)
        files.write_text(path, "ours")
        assert theirs.read_text() == "theirs"
        assert path.read_text() == "ours" and not path.is_symlink()
        assert not aside.is_symlink() and not aside.exists()


def test_two_processes_may_write_the_same_file(path, monkeypatch):
    """As out/latest.json, when two runs start at once."""
    pids, real = iter([1, 2]), files.sync
    monkeypatch.setattr(os, "getpid", lambda: next(pids))

    def meanwhile(aside: Path) -> None:
        monkeypatch.setattr(files, "sync", real)
        files.write_json(path, {"by": 2, "longer": "x" * 99})

    monkeypatch.setattr(files, "sync", meanwhile)
    files.write_json(path, {"by": 1})
    assert files.read_json(path)["by"] == 1 and list(path.parent.iterdir()) == [path]


def test_files_are_as_readable_as_any_other_and_never_executable(path):
    (path.parent / "plain").write_text("x")
    files.write_json(path, VALUE)
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode
    assert not path.stat().st_mode & 0o111


# ------------------------------------------------------------------------------------ whole folders


def whole(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir()}


def put(folder: Path, text: str) -> None:
    with files.replacing_folder(folder) as aside:
        (aside / "a").write_text(text)


def test_a_folder_is_replaced_whole_or_stays(tmp_path):
    folder = tmp_path / "run [1]"
    put(folder, "old")
    put(folder, "new")
    with pytest.raises(OSError, match="full"), files.replacing_folder(folder) as aside:
        (aside / "a").write_text("half")
        raise OSError("full")
    assert whole(folder) == {"a": "new"} and [*tmp_path.iterdir()] == [folder]


def test_where_the_new_one_cannot_be_put_the_old_one_comes_back(tmp_path, monkeypatch):
    folder, rename = tmp_path / "x", Path.rename
    put(folder, "old")

    def fail(old: Path, new: Path) -> Path:
        if new == folder and "-old-" not in old.name:
            raise OSError("no")
        return rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no"):
            put(folder, "new")
    assert whole(folder) == {"a": "old"} and [*tmp_path.iterdir()] == [folder]


def test_where_another_process_was_faster(tmp_path, monkeypatch):
    folder, hide = tmp_path / "x", files.hide
    put(folder, "old")

    def late(place: Path) -> Path:
        hidden = hide(place)
        place.mkdir()
        (place / "a").write_text("theirs")
        return hidden

    monkeypatch.setattr(files, "hide", late)
    with pytest.raises(UserError, match="x: another process has just written it"):
        put(folder, "new")
    assert whole(folder) == {"a": "theirs"} and [*tmp_path.iterdir()] == [folder]


def test_an_error_of_the_disk_names_what_was_to_be_there(tmp_path):
    full = partial(OSError, errno.ENOSPC, os.strerror(errno.ENOSPC))
    for replacing in (files.replacing, files.replacing_folder):
        with pytest.raises(OSError, match="No space") as caught, replacing(tmp_path / "x"):
            raise full()
        assert caught.value.filename == str(tmp_path / "x")
    with pytest.raises(OSError, match="No space") as caught, files.replacing_folder(
            tmp_path / "x") as aside:
        raise full(str(aside / "model.safetensors"))
    assert caught.value.filename == str(tmp_path / "x" / "model.safetensors")
    with pytest.raises(ConnectionError) as caught, files.replacing(tmp_path / "x"):
        raise ConnectionResetError(errno.ECONNRESET, "no fault of the disk")
    assert caught.value.filename is None and not [*tmp_path.iterdir()]


def test_two_processes_may_write_the_same_folder(tmp_path, monkeypatch):
    """Each has its own place aside, and one of them wins."""
    folder = tmp_path / "x"
    with files.replacing_folder(folder) as aside:
        (aside / "a").write_text("first")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", os.getppid)
            put(folder, "second")
            assert whole(folder) == {"a": "second"} and aside.exists()
    assert whole(folder) == {"a": "first"} and [*tmp_path.iterdir()] == [folder]


@pytest.mark.skipif(os.name == "nt", reason="os.kill")
def test_what_the_dead_left_aside_goes_and_nothing_else(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    mine = [f".tmp-{os.getppid()}-x", ".tmp-old-y", ".tmp-abc-x", f".tmp-{child.pid}-y", ".tmp-x"]
    for name in (*mine, f".tmp-{child.pid}-x"):
        (tmp_path / name).mkdir()
    put(tmp_path / "x", "new")
    assert {p.name for p in tmp_path.iterdir()} == {*mine, "x"}
