"""Documents: found in the same order everywhere, read without a change, or named as broken."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
import unicodedata

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data.making import formats, sources
from data.making.sources import Piece, documents, fetched
from data.making.tokenizers import make_tokenizer
from kit.errors import UserError

CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
          r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SAMPLE = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}]}
SPELLED = ('{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"é"}]}')


def texts(source, **options) -> dict[str, str]:
    """Text of each document by its place."""
    found = {}
    for piece in documents(str(source), **options):
        assert piece.starts == (piece.place not in found)
        found[piece.place] = found.get(piece.place, "") + piece.text
    return found


def write_lines(path, *records) -> str:
    path.write_bytes("".join(json.dumps(r) + "\n" for r in records).encode())
    return str(path)


def refused(source, **options) -> str:
    """The one line that a source is refused with."""
    with pytest.raises(UserError) as error:
        texts(source, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------- files, folders


def test_a_file_is_one_document_to_the_byte(tmp_path):
    path = tmp_path / "my text.txt"
    path.write_bytes("a\r\nb\n\0é😀\ufeff".encode())
    assert list(documents(str(path))) == [Piece(str(path), "a\r\nb\n\0é😀\ufeff", True, False)]
    assert texts(path) == texts(path)  # calling again starts again


def test_a_bad_byte_is_named_and_can_be_replaced(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 noir")
    assert re.search(r"latin\.txt: byte 0xe9 at offset 3 .*--errors=replace", refused(path))
    assert texts(path, errors="replace") == {str(path): "caf\ufffd noir"}


@given(content=st.lists(st.sampled_from([b"a", b" ", b"\n", "é".encode(), "😀".encode(), b"\xff",
                                         b"\xe2\x82", b"\xf0"]), max_size=30).map(b"".join),
       block=st.integers(2, 5), piece=st.integers(1, 8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_blocks_and_pieces_change_nothing(tmp_path, content, block, piece):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", block)
        patch.setattr(formats, "PIECE", piece)
        assert "".join(texts(path, errors="replace").values()) == content.decode(errors="replace")
        try:
            whole = content.decode()
        except UnicodeDecodeError as error:
            bad = f"byte 0x{content[error.start]:02x} at offset {error.start} is"
            assert bad in refused(path)
        else:
            assert "".join(texts(path).values()) == whole


def test_a_missing_source_is_named(tmp_path):
    assert re.search(r"no file or folder.*nothing\.txt.*stdlib, shakespeare",
                     refused(tmp_path / "nothing.txt"))


def test_a_folder_gives_its_texts_by_name(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "a/b/c.md", ".hidden", ".git/config", "a/.x/y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"PNG" + bytes(10))
    (tmp_path / "late.txt").write_bytes(b"x" * 8192 + b"\0")  # text, as far as the probe looks
    (tmp_path / "paper.PDF").write_bytes(b"%PDF-1.4")
    skipped = {"empty": 0, "binary": 0}
    names = list(texts(tmp_path, skipped=skipped))
    assert names == ["a.txt", "a/b/c.md", "a/z.txt", "b.txt", "late.txt"]
    assert skipped == {"empty": 1, "binary": 2}


def test_a_folder_may_hold_every_form(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"zipped text"))
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(bytes(512)))
    write_lines(tmp_path / "d.JSONL", {"text": "one"}, {"text": ""}, {"text": "three"})
    (tmp_path / "e.ndjson.gz").write_bytes(gzip.compress(b'{"text": "zipped line"}'))
    parquet.write_table(pa.table({"text": ["row", None]}), tmp_path / "f.parquet")
    write_lines(tmp_path / "g.jsonl", SAMPLE)
    skipped = {}
    assert texts(tmp_path, skipped=skipped) == {
        "a.txt": "text", "b.txt.gz": "zipped text", "d.JSONL, line 1": "one",
        "d.JSONL, line 3": "three", "e.ndjson.gz, line 1": "zipped line", "f.parquet, row 1": "row",
        "g.jsonl, line 1": SPELLED}
    assert skipped == {"empty": 2, "binary": 1}
    assert list(documents(str(tmp_path))) == list(documents(str(tmp_path)))


def test_a_binary_file_of_its_folders_name_is_binary_too(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/a").write_bytes(bytes(9))
    monkeypatch.chdir(tmp_path)
    assert texts("a") == {} and texts("a/a") == {"a/a": "\0" * 9}


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
    assert next(documents("stdlib")).text != "mine"


@pytest.mark.parametrize("name, way", [
    ("pile.jsonl.zst", 'zstdcat "{}" | python -m data.prepare - --name=NAME'),
    ("00.ZST", 'zstdcat "{}" | python -m data.prepare - --name=NAME'),
    ("a.txt.xz", 'xzcat "{}" | python -m data.prepare - --name=NAME'),
    ("enwik8.zip", 'unzip -p "{}" | python -m data.prepare - --name=NAME'),
    ("paper.pdf", "convert it first"), ("letter.docx", "convert it first")])
def test_a_packed_file_is_refused_with_the_way_to_unpack_it(name, way, tmp_path):
    (tmp_path / name).write_bytes(b"text, for all that the probe knows")
    assert way.format(tmp_path / name) in refused(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_gzip_file_that_is_cut_or_none_is_named(name, tmp_path):
    whole = gzip.compress(b'{"text": "' + os.urandom(3000).hex().encode() + b'"}\n')
    for content in (whole[:-9], whole[:2000], b"no gzip", whole[:1500] + b"\xff" * 90):
        (tmp_path / name).write_bytes(content)
        assert "is no whole gzip file" in refused(tmp_path / name)
        if content != b"no gzip":
            assert name in refused(tmp_path)  # of a folder too


# ---------------------------------------------------------------------------------------- pieces


def test_a_piece_ends_with_what_tokenizers_call_a_letter_or_a_digit():
    ends = re.compile(r"[^\W_]")
    found = [c for c in map(chr, range(sys.maxunicode + 1)) if ends.match(c)]
    assert len(found) > 100_000
    assert all(unicodedata.category(c)[0] in "LN" for c in found)


@given(text=st.text(st.sampled_from("aZé1٣字_.'’s /\n\r\t\u3000\u0301😀"), max_size=60),
       piece=st.integers(1, 12))
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture],
          deadline=None)
def test_ids_of_the_pieces_are_those_of_the_whole(gpt2_offline, text, piece):
    for encode in _encoders():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(formats, "PIECE", piece)
            pieces = [p.text for p in formats._cut("", [text], {})]
        assert "".join(pieces) == text
        if all(len(p) < 16 * piece for p in pieces):  # else cut where there was no good place
            assert [id for part in pieces for id in encode(part)] == list(encode(text))


ENCODERS = []


def _encoders():
    """encode of gpt2, and of the rules of cl100k and o200k with GPT-2's merges."""
    if not ENCODERS:
        import tiktoken

        gpt2 = make_tokenizer("gpt2")
        ranks = {gpt2.token_bytes(i): i for i in range(50256)}
        ENCODERS.append(gpt2.encode)
        for rule in (CL100K, O200K):
            ENCODERS.append(tiktoken.Encoding("x", pat_str=rule, mergeable_ranks=ranks,
                                              special_tokens={}).encode_ordinary)
    return ENCODERS


def test_a_long_text_is_cut_after_words_and_a_wall_of_letters_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "PIECE", 10)
    monkeypatch.setattr(formats, "BLOCK", 7)
    path = tmp_path / "a.txt"
    path.write_text("one two three four five, " + "x" * 400 + " end", encoding="utf-8")
    pieces = list(documents(str(path)))
    assert [p.text for p in pieces[:2]] == ["one two three", " four"]
    assert [p.starts for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(p.text) for p in pieces) < 16 * 10 + 7
    line = write_lines(tmp_path / "a.jsonl", {"text": path.read_text()}, {"text": "short"})
    found = list(documents(line))
    assert [p.starts for p in found] == [True] + [False] * (len(found) - 2) + [True]
    assert found[0].place == f"{line}, line 1" and len(found) > 4
    assert "".join(p.text for p in found) == path.read_text() + "short"


def test_a_place_to_cut_is_found_where_parts_meet_and_after_a_wall(monkeypatch):
    monkeypatch.setattr(formats, "PIECE", 4)
    for parts in (["xxxxx", " y"], ["xxxxxxx", " a", " !!!"]):
        assert [p.text for p in formats._cut("", parts, {})] == parts


def test_memory_does_not_grow_with_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK", 1 << 12)
    monkeypatch.setattr(formats, "PIECE", 1 << 12)
    path = tmp_path / "long.txt"
    path.write_text("x" * 3_000_000 + "a word " * 400_000, encoding="utf-8")
    tracemalloc.start()
    assert sum(len(p.text) for p in documents(str(path))) == 5_800_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


# ---------------------------------------------------------------------------------- lines and rows


def test_lines_are_documents_whatever_else_they_hold(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\u0000\\ud83d\\ude00"}\r\n\r\n  \n{"n": NaN, "m": '
                     + b"9" * 5000 + b', "x": "\\ud800", "text": "b", "y": [null]}\n{"text":"c"}')
    assert texts(path) == {f"{path}, line 1": "a\0😀", f"{path}, line 4": "b",
                           f"{path}, line 5": "c"}


@pytest.mark.parametrize("line, reason", [
    (b'{"text": "a"', "line 2 is not JSON (Expecting"), (b"[1]", "line 2 is no JSON object"),
    (b'"text"', "line 2 is no JSON object"), (b"{} {}", "line 2 is not JSON (Extra data)"),
    (b'{"body": "a", "id": 3}', "line 2 has no column 'text', but ['body', 'id']; name one with "
     "--text_column="), (b"{}", "line 2 has no column 'text', but []"),
    (b'{"text": 3.5}', "line 2: 'text' is of type number and no text"),
    (b'{"text": "\xe9t\xe9"}', "line 2: byte 0xe9 at offset 24 is not UTF-8"),
    (b"[" * 200_000, "line 2 is not JSON (")])
def test_a_broken_line_is_named(line, reason, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line)
    assert f"{path}, {reason}" in refused(path)


def test_broken_characters_of_lines_are_replaced_if_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xe9\\ud800\\ud83d\\ude00"}\n' + json.dumps(SAMPLE).replace(
        "hi", "\\ude00").encode())
    first, second = texts(path, errors="replace").values()
    assert first == "\ufffd\ufffd😀" and second == SPELLED.replace("hi", "\ufffd")


def test_text_column_names_the_column(tmp_path):
    line = write_lines(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    assert list(texts(line, text_column="body").values()) == ["yes"]
    assert "has no column 'bodies', but ['text', 'body']" in refused(line, text_column="bodies")
    row = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["no"], "body": ["yes"]}), row)
    assert texts(row, text_column="body") == {f"{row}, row 1": "yes"}
    assert "has no column 'bodies', but ['text', 'body']" in refused(row, text_column="bodies")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(),
                                  pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_rows_are_documents(kind, tmp_path):
    path, values = tmp_path / "a.parquet", [f"text {i % 7}\0é" for i in range(200)]
    table = pa.table({"id": range(200), "text": pa.array(values).cast(kind)})
    parquet.write_table(table, path, row_group_size=90)
    assert texts(path) == {f"{path}, row {i}": text for i, text in enumerate(values, 1)}


def test_a_broken_table_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [os.urandom(400).hex() for _ in range(400)]}), path,
                        use_dictionary=False, compression="gzip")
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-100], whole[50:]):
        path.write_bytes(content)
        assert "is no whole parquet file after row 0" in refused(path)
    path.write_bytes(whole[:90_000] + bytes(len(whole) - 100_000) + whole[-10_000:])
    assert re.search(r"is no whole parquet file after row \d+ ", refused(path))
    parquet.write_table(pa.table({"text": [1]}), path)
    assert f"{path}, row 1: 'text' is of type int and no text" in refused(path)
    latin = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"),
                                        pa.py_buffer(b"\xe9"))
    parquet.write_table(pa.table({"text": latin}), path)
    assert "one of the rows 1 to 64 is not UTF-8" in refused(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refused(path)


# -------------------------------------------------------------------------------- instruction data


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hf"])
def test_instruction_samples_are_known_by_their_columns(form, tmp_path, hub_offline):
    pairs = [{"prompt": "1+1?", "completion": "2", "text": "no", "id": 1},
             {"prompt": "no answer", "completion": "", "text": "no", "id": 2}]
    chats = [{**SAMPLE, "id": 1}, {"messages": SAMPLE["messages"][:1], "id": 2}]
    for records, text in ((pairs, '{"prompt":"1+1?","completion":"2"}'), (chats, SPELLED)):
        (tmp_path / "x").mkdir(exist_ok=True)
        path, skipped = tmp_path / "x" / ("a.parquet" if form == "parquet" else "a.jsonl"), {}
        if form == "parquet":
            parquet.write_table(pa.Table.from_pylist(records), path)
        else:
            write_lines(path, *records)
        with fetched([f"hf:{tmp_path / 'x'}" if form == "hf" else str(path)]) as [(_, source)]:
            (piece,) = documents(source, skipped=skipped)
        assert piece.text == text and piece.sample and piece.starts
        assert skipped == {"without target": 1}
    write_lines(tmp_path / "p.jsonl", *pairs)
    found = documents(str(tmp_path / "p.jsonl"), text_column="prompt")
    assert [(p.text, p.sample) for p in found] == [("1+1?", False), ("no answer", False)]


def test_a_malformed_sample_is_named(tmp_path):
    line = write_lines(tmp_path / "a.jsonl", SAMPLE, {"messages": [{"role": "user"}]})
    assert f"{line}, line 2: message 1: content is missing" in refused(line)


# --------------------------------------------------------------------------------- the hub, offline


@pytest.fixture
def hub_offline(tmp_path, monkeypatch):
    """`datasets` keeps its locks in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return datasets


def fetch(source, **options) -> tuple[str, list[str], list[str]]:
    """Name, texts and what was said."""
    said = []
    with fetched([source], say=said.append, **options) as [(name, path)]:
        return name, list(texts(path, **options).values()), said


def refused_fetch(source, **options) -> str:
    with pytest.raises(UserError) as error:
        fetch(source, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def hub(tmp_path, hub_offline):
    """A data set with two splits and a second column."""
    folder = tmp_path / "set"
    folder.mkdir()
    parquet.write_table(pa.table({"id": [1, 2, 3], "text": ["a\né", None, "c"]}),
                        folder / "train.parquet")
    parquet.write_table(pa.table({"id": [4], "text": ["v"]}), folder / "validation.parquet")
    return folder


def test_a_data_set_is_written_once_and_used_again(hub, data_folder):
    name, found, said = fetch(f"hf:{hub}")
    assert name == "hf:set" and found == ["a\né", "c"]
    assert "writing to" in said[0] and "GB of room" in said[0]
    (kept,) = (data_folder / ".cache").iterdir()
    assert re.fullmatch(r"hf-.*set-[0-9a-f]{10}\.jsonl", kept.name)
    assert kept.read_text(encoding="utf-8").splitlines()[0] == '{"text": "a\\né"}'
    assert fetch(f"hf:{hub}")[1] == found
    size = f"{kept.stat().st_size:,} bytes"
    assert size in fetch(f"hf:{hub}")[2][0] and "may be deleted" in fetch(f"hf:{hub}")[2][0]
    parquet.write_table(pa.table({"text": ["new"]}), hub / "train.parquet")  # it is local
    parquet.write_table(pa.table({"text": ["new"]}), hub / "validation.parquet")
    assert fetch(f"hf:{hub}")[1] == ["new"]


@pytest.mark.parametrize("rest, text", [(":validation", "v"), ("::validation", "v"),
                                        (":default:validation", "v"), (":default", "a\né")])
def test_config_and_split_are_told_apart(rest, text, hub):
    assert fetch(f"hf:{hub}{rest}")[1][0] == text


def test_what_a_data_set_lacks_is_named(hub, data_folder):
    assert "Available splits: ['train', 'validation']" in refused_fetch(f"hf:{hub}::nope")
    assert "Available: ['default']" in refused_fetch(f"hf:{hub}:nope")
    assert "has no column 'body', but ['id', 'text']" in refused_fetch(
        f"hf:{hub}", text_column="body")
    assert "'id' is of type number and no text" in refused_fetch(f"hf:{hub}", text_column="id")
    assert "expected hf:NAME" in refused_fetch("hf:")
    assert "expected hf:NAME" in refused_fetch("hf:a:b:c:d")
    assert "parquet or jsonl files" in refused_fetch(f"hf:{hub.parent / 'nothing'}")
    script = hub.parent / "script"
    script.mkdir()
    (script / "script.py").write_text("x = 1\n", encoding="utf-8")
    assert "loader scripts are no longer run" in refused_fetch(f"hf:{script}")
    assert [p.suffix for p in (data_folder / ".cache").iterdir()] == [".jsonl"]  # of `id`


def test_lines_of_a_data_set_are_read_too(tmp_path, hub_offline):
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set/train.jsonl", {"body": "one", "id": 1}, {"body": None, "id": 2})
    assert fetch(f"hf:{tmp_path / 'set'}", text_column="body")[1] == ["one"]


def test_a_download_that_breaks_leaves_nothing(hub, hub_offline, monkeypatch, data_folder):
    class Stream:
        column_names = ["text"]

        def select_columns(self, names):
            yield {"text": "a"}
            raise ConnectionError("Couldn't reach the Hub\nfor long")

    monkeypatch.setattr(hub_offline, "load_dataset", lambda *a, **k: Stream())
    assert "Hub for long; check name and network, or download its" in refused_fetch("hf:a/b")
    assert list((data_folder / ".cache").iterdir()) == []
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refused_fetch("hf:a/b")


# ----------------------------------------------------------------------------------- standard input


def pipe(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input_can_be_read_twice_and_is_deleted(monkeypatch, data_folder, text_file):
    pipe(monkeypatch, "a\r\né".encode())
    with fetched(["-", str(text_file), "stdlib"]) as found:
        assert [name for name, _ in found] == ["stdin", "my text.txt", "stdlib"]
        assert [source for _, source in found[1:]] == [str(text_file), "stdlib"]
        for _ in range(2):
            assert list(texts(found[0][1]).values()) == ["a\r\né"]
    assert list((data_folder / ".cache").iterdir()) == []
    pipe(monkeypatch, b'{"text": "a"}\n{"text": "b"}')
    assert fetch("-")[:2] == ("stdin", ["a", "b"])
    for text in ("{no JSON}", "[1]\n{}", '{"cut'):  # no object first: one text
        pipe(monkeypatch, text.encode())
        assert fetch("-")[:2] == ("stdin", [text])
    pipe(monkeypatch, b"")
    assert fetch("-")[1] == []
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refused_fetch_all(["-"])
    assert "can be given only once" in refused_fetch_all(["-", "-"])


def refused_fetch_all(names) -> str:
    with pytest.raises(UserError) as error, fetched(names):
        pass
    return str(error.value)


def test_standard_input_is_deleted_after_an_error_too(monkeypatch, data_folder):
    pipe(monkeypatch, b"a")
    with pytest.raises(UserError), fetched(["-", "hf:"]):
        pass
    with pytest.raises(KeyboardInterrupt), fetched(["-"]):
        raise KeyboardInterrupt
    assert list((data_folder / ".cache").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="there it stays")
def test_what_killed_processes_left_is_removed(data_folder):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    cache = data_folder / ".cache"
    cache.mkdir(parents=True)
    kept = {"hf-a-0123456789.jsonl", f"stdin-{os.getppid()}", "tinyshakespeare.txt"}
    for name in (*kept, f"stdin-{dead.pid}", f"stdin-{dead.pid}.jsonl",
                 f".tmp-{dead.pid}-hf-a-0123456789.jsonl", f".tmp-{dead.pid}"):
        (cache / name).touch()
    with fetched(["stdlib"]):
        assert {p.name for p in cache.iterdir()} == kept


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
    with pytest.raises(UserError, match=r"served\.txt \(14 bytes\) has SHA-256 .*expected.*try"):
        texts("shakespeare")
    assert not (data_folder / ".cache").exists()


def test_a_damaged_copy_is_not_used(served, data_folder):
    texts("shakespeare")
    (data_folder / ".cache/tinyshakespeare.txt").write_bytes(b"First")
    assert texts("shakespeare") == {"shakespeare": "First Citizen:\n"}  # downloaded again
    (data_folder / ".cache/tinyshakespeare.txt").write_bytes(b"First")
    served.unlink()
    with pytest.raises(UserError, match="could not download"):
        texts("shakespeare")


def test_without_network_a_local_path_is_asked_for(served):
    served.unlink()
    with pytest.raises(UserError, match="could not download .*give a local copy"):
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
    with pytest.raises(UserError, match="zipped, absent or stripped") as error:
        list(documents("stdlib"))
    assert "\n" not in str(error.value) and "--dataset=my.txt" in str(error.value)


@pytest.mark.parametrize("name", ("a.tar.gz", "a.zip.gz", "a.parquet.gz"))
def test_what_is_below_gz_counts_too(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"anything"))
    assert f"{name} is not read as it is" in refused(tmp_path / name)


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert "has 2 columns 'text'; rename all but one" in refused(tmp_path / "a.parquet")


def test_a_table_of_both_forms_has_nulls(tmp_path):
    rows = [{"messages": None, "prompt": "a", "completion": "b"},
            {"messages": SAMPLE["messages"], "prompt": None, "completion": None}]
    parquet.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "a.parquet")
    found = [piece.text for piece in documents(str(tmp_path / "a.parquet"))]
    assert found == [SPELLED, '{"prompt":"a","completion":"b"}']


def test_utf_16_is_named_and_not_taken_for_binary(tmp_path):
    (tmp_path / "notes").mkdir()
    path = tmp_path / "notes" / "windows.txt"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        bom = b"" if encoding == "utf-16" else "\ufeff".encode(encoding)
        path.write_bytes(bom + ("née " * 5000).encode(encoding))
        for source in (path, path.parent):
            assert "windows.txt is UTF-16; save it as UTF-8: iconv" in refused(source)
    path.write_bytes(b"\xff\xfe\x00\xdc" * 100)  # but this is no UTF-16
    assert texts(path.parent) == {}


def test_a_json_list_is_no_text_unless_it_lies_in_a_folder(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text('\n [{"text": "a"}]')
    assert 'jq -c ".[]"' in refused(path)
    assert list(texts(tmp_path)) == ["alpaca.json"]
    path.write_text('{"a": 1}')
    assert list(texts(path).values()) == ['{"a": 1}']


def test_null_is_an_empty_text_everywhere(tmp_path):
    skipped = {}
    path = write_lines(tmp_path / "a.jsonl", {"text": None}, {"text": "b"})
    assert [p.text for p in documents(str(path), skipped=skipped)] == ["b"]
    assert skipped["empty"] == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_or_device_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", "/dev/null"):
        assert f"{source} is a pipe or a device" in refused(source)
    assert "there is no file or folder ''" in refused("")


@pytest.mark.parametrize("block", (2, 3, 1 << 18))
@pytest.mark.parametrize("text", (
    "one<|eot|>two\n<|eot|>\nthree", "<|eot|>one<|eot|><|eot|>two<|eot|>", "no mark <|eo",
    "<|eot|>", "<|e<|eot|>ot|>", "a<|eot|>" * 50))
def test_a_text_is_split_at_a_mark_wherever_blocks_end(tmp_path, monkeypatch, text, block):
    monkeypatch.setattr(formats, "BLOCK", block)
    path = tmp_path / "stories.txt"
    path.write_text(text, newline="")
    found = [p.text for p in documents(str(path), split_at="<|eot|>")]
    assert found == [part for part in text.split("<|eot|>") if part]
    assert [p.text for p in documents(str(path))] == [text]


def test_documents_of_a_split_text_may_be_long(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "PIECE", 100)
    stories = ["word " * 90, "short", "other " * 300]
    path = tmp_path / "stories.txt"
    path.write_text("\n###\n".join(stories))
    found = []
    for piece in documents(str(path), split_at="\n###\n"):
        if piece.starts:
            found.append("")
        found[-1] += piece.text
    assert found == stories
