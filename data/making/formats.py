"""What is in a file: text, JSON lines or a parquet table, as a stream of documents."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data import instruct
from kit.errors import UserError

BINARY_PROBE_BYTES = 8192  # a NUL among the first ones marks a file in a folder as binary
BLOCK = 1 << 18  # bytes that are read at once
PIECE = 1 << 20  # characters; a longer text is handed on in pieces
# The last place where a text may be cut: no rule of gpt2, cl100k or o200k lets a token run from a
# letter or digit into the space or line end after it, so the pieces have the ids of the whole.
PIECE_END = re.compile(r"(?s:.*)[^\W_](?=[ \n])")
LONGEST_LINE = 1 << 28  # bytes; a longer one is cut, and so no JSON: a .gz can hold one of any size
ROWS = 64  # of a table, read at once: few enough for documents of a megabyte
LONE = re.compile("[\ud800-\udfff]")  # half of a pair of UTF-16, which UTF-8 cannot write
JSON = json.JSONDecoder(strict=False, parse_int=float)  # int() refuses 5,000 digits
# Endings of what is no text, and what prints the text inside where one command does.
PACKED = {".zst": "zstdcat", ".xz": "xzcat", ".bz2": "bzcat", ".zip": "unzip -p", ".7z": "7z x -so",
          ".tar": "", ".tgz": "", ".pdf": "", ".docx": "", ".bin": ""}


class Piece(NamedTuple):
    """A document, or a part of a long one."""
    place: str  # for messages: "a.txt", "b.jsonl, line 7", "c.parquet, row 3"; the first is 1
    text: str
    starts: bool = True  # a document begins with it
    sample: bool = False  # it is an instruction sample, as `instruct.canonical` spells it


def read(name: str, path: Path, named: bool, errors: str, text_column: str | None,
         skipped: dict[str, int], split_at: str | None) -> Iterator[Piece]:
    """The documents of one file; its ending tells what it is.

    name: of the file, for the places. named: by the user; in a folder other files may lie, and what
    looks binary is left out. The rest: see `sources.documents`.
    """
    lower = path.name.lower()
    packed = PACKED.get(Path(lower.removesuffix(".gz")).suffix)
    if lower.endswith(".parquet.gz"):
        packed = ""
    if named and packed is not None:
        way = f': {packed} "{path}" | python -m data.prepare - --name=NAME' if packed else ""
        raise UserError(f"{path} is not read as it is; unpack or convert it first{way}")
    try:
        if lower.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
            yield from _select(name, path, _lines(path, errors), text_column, skipped)
        elif lower.endswith(".parquet"):
            yield from _select(name, path, _rows(path, text_column), text_column, skipped)
        elif packed is not None or _is_binary(path, named):
            _count(skipped, "binary")
        else:
            yield from _cut(name, _split(_decoded(path, errors), split_at), skipped)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is no whole gzip file ({one_line(error)}); get it anew") from None


def _open(path: Path) -> BinaryIO:
    """For bytes, as reading text would change line ends."""
    if path.name.lower().endswith(".gz"):
        return io.BufferedReader(gzip.open(path), BLOCK)
    return open(path, "rb", BLOCK)


def _is_binary(path: Path, named: bool) -> bool:
    """Whether to pass over a file; UserError for what is text, but not to be read as it is."""
    with _open(path) as file:
        head = file.read(BINARY_PROBE_BYTES)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what Windows calls Unicode
        with suppress(UnicodeDecodeError):
            head[:len(head) // 2 * 2].decode("utf-16")
            raise UserError(f"{path} is UTF-16; save it as UTF-8: "
                            f'iconv -f UTF-16 -t UTF-8 "{path}" > NAME.txt')
    if named and path.suffix.lower() == ".json" and head.lstrip()[:1] == b"[":
        raise UserError(f"{path} is one JSON list and would be one text; make each of its items a "
                        f'line of a .jsonl file: jq -c ".[]" "{path}" > NAME.jsonl')
    return not named and b"\0" in head


def is_object(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _count(skipped: dict[str, int], reason: str) -> None:
    skipped[reason] = skipped.get(reason, 0) + 1


def one_line(error: Exception) -> str:
    """The message of a library, which may have many lines."""
    return " ".join(str(error).split())[:300]


def _decoded(path: Path, errors: str) -> Iterator[str]:
    """The text of a file in blocks: a file is never held."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(errors), 0
    with _open(path) as file:
        while True:
            block = file.read(BLOCK)
            begin = offset - len(decoder.getstate()[0])  # a block's end may cut a character
            offset += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _bad_byte(path, begin, error) from None
            if not block:
                return


def _bad_byte(place: object, begin: int, error: UnicodeDecodeError) -> UserError:
    return UserError(
        f"{place}: byte 0x{error.object[error.start]:02x} at offset {begin + error.start} is not "
        "UTF-8; save the file as UTF-8, or put U+FFFD there with --errors=replace")


def _split(parts: Iterable[str], at: str | None) -> Iterator[str | None]:
    """The parts of a text without what it is split at, and None where a document ends by that."""
    held, size = "", len(at or "")
    for part in parts:
        *done, held = (held + part).split(at) if at else [part]
        for text in done:
            yield from (text, None)
        end = max(0, len(held) - size + 1) if at else len(held)  # the rest may begin a mark
        yield held[:end]
        held = held[end:]
    yield held


def _cut(place: str, parts: Iterable[str | None], skipped: dict[str, int]) -> Iterator[Piece]:
    """Documents from the parts of their text, in pieces that each end at the last PIECE_END."""
    held, looked, starts = "", 0, True
    for part in chain(parts, [None]):
        if part is None:
            if held:
                yield Piece(place, held, starts)
            elif starts:
                _count(skipped, "empty")
            held, looked, starts = "", 0, True
            continue
        held += part
        while len(held) > PIECE:
            found = PIECE_END.match(held, looked)
            # Without one for so long the cut lies anywhere: what is held must have a bound.
            if not found and len(held) < 16 * PIECE:
                looked = len(held) - 1
                break
            end = found.end() if found else len(held)
            yield Piece(place, held[:end], starts)
            held, looked, starts = held[end:], 0, False


def _lines(path: Path, errors: str) -> Iterator[tuple[str, dict]]:
    """(", line N", object) of each line that is not blank."""
    offset = 0
    with _open(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            where = f", line {number}"
            try:
                line = raw.decode("utf-8", errors).lstrip("\ufeff")  # Windows begins files so
            except UnicodeDecodeError as error:
                raise _bad_byte(f"{path}{where}", offset, error) from None
            offset += len(raw)
            if not line or line.isspace():
                continue
            try:
                record = JSON.decode(line)
                if errors == "replace" and "\\u" in line:  # an escape may be half a pair
                    written = json.dumps(record, ensure_ascii=False)
                    record = JSON.decode(LONE.sub("\ufffd", written))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}{where} is not JSON ({getattr(error, 'msg', error)}); "
                                "expected one object a line") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}{where} is no JSON object; expected one a line")
            yield where, record


def _rows(path: Path, text_column: str | None) -> Iterator[tuple[str, dict]]:
    """(", row N", {column: value}) of each row, with the columns that are needed."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} cannot be read without pyarrow: pip install pyarrow") from None
    done = 0
    try:
        # Unless told otherwise, pyarrow holds a whole row group, which may be the whole file.
        with parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False) as file:
            wanted = columns(file.schema_arrow.names, path, text_column)
            for batch in file.iter_batches(ROWS, columns=wanted):
                for number, record in enumerate(batch.to_pylist(), done + 1):
                    yield f", row {number}", record
                done += len(batch)
    except UnicodeDecodeError:
        raise UserError(f"{path}: one of the rows {done + 1} to {done + ROWS} is not UTF-8; mend "
                        "it, or give the table as .jsonl with --errors=replace") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole parquet file after row {done} "
                        f"({one_line(error)}); copy or download it again") from None


def columns(there: Iterable[str], place: object, text_column: str | None) -> list[str]:
    """Those that make a document; UserError names the ones there are if one is missing."""
    there, column = list(there), text_column or "text"
    if text_column is None and instruct.has_form(dict.fromkeys(there)):
        return [name for name in ("messages", "prompt", "completion") if name in there]
    if there.count(column) > 1:
        raise UserError(f"{place} has {there.count(column)} columns {column!r}; rename all but one")
    if column not in there:
        raise UserError(f"{place} has no column {column!r}, but {there[:30]}; name one with "
                        "--text_column=")
    return [column]


def _select(name: str, path: Path, records: Iterable[tuple[str, dict]],
            text_column: str | None, skipped: dict[str, int]) -> Iterator[Piece]:
    """The document, or instruction sample, of each (", line N", {column: value})."""
    for where, record in records:
        place = f"{name}{where}"
        column = columns(record, f"{path}{where}", text_column)[0]
        # A table has every column in every row, and null where there is no text.
        record = {name: "" if value is None else value for name, value in record.items()}
        try:
            if text_column is None and instruct.has_form(record):
                sample = instruct.canonical(record)
                if sample is None:
                    _count(skipped, "without target")
                else:
                    yield Piece(place, sample, sample=True)
                continue
            text = record[column]
            if not isinstance(text, str):
                kind = type(text).__name__.replace("float", "number")
                raise ValueError(f"{column!r} is of type {kind} and no text")
        except (UserError, ValueError) as error:
            raise UserError(f"{path}{where}: {error}") from None
        parts = (text[i:i + PIECE] for i in range(0, len(text), PIECE))
        yield from _cut(place, parts, skipped)
