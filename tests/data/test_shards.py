"""Shards on disk, and the rows and windows read from them."""

import hashlib
import json
import os
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.dataset import Dataset
from data.making.build import prepare
from data.making.writer import ShardWriter
from data.order import permute, window_starts
from data.shards import Split
from kit.errors import UserError


def split_of(folder, tokens, shard_tokens=100, vocab_size=50_000, name="train") -> Split:
    writer = ShardWriter(folder, name, vocab_size, shard_tokens)
    writer.write(np.asarray(tokens))
    writer.finish()
    return Split(name, [folder / shard["file"] for shard in writer.shards], vocab_size)


def windows_per_epoch(split: Split, block_size: int) -> int:
    return max(1, (split.n_tokens - 1) // block_size - 1)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Splits of the tokens 0, 1, 2, ..., in shards of 7, so that an id is its own position."""
    made = {}

    def get(n_tokens: int) -> Split:
        if n_tokens not in made:
            folder = tmp_path_factory.mktemp(f"counting-{n_tokens}")
            made[n_tokens] = split_of(folder, np.arange(n_tokens), shard_tokens=7)
        return made[n_tokens]

    return get


# ------------------------------------------------------------------------------------------ format


@pytest.mark.parametrize("vocab_size, magic, version, letter", (
    (65_536, 20240520, 1, "H"), (65_537, 20240801, 7, "I")))
def test_a_shard_is_llm_c_s_byte_for_byte(tmp_path, vocab_size, magic, version, letter):
    ids = [0, 1, 258, vocab_size - 1]
    split = split_of(tmp_path, ids, vocab_size=vocab_size)
    raw = (tmp_path / "train_000000.bin").read_bytes()
    assert raw == struct.pack("<256i", magic, version, 4, *[0] * 253) + struct.pack(f"<4{letter}",
                                                                                  *ids)
    assert split.read(0, 4).tolist() == ids


def test_shards_fill_up_in_turn(tmp_path):
    writer = ShardWriter(tmp_path, "val", 256, shard_tokens=4)
    for ids in ([1, 2, 3], [], [4, 5, 6, 7, 8, 9, 10], [11]):
        writer.write(np.array(ids, dtype=np.int64))
    assert [s["file"] for s in writer.shards] == ["val_000000.bin", "val_000001.bin"]
    with pytest.raises(UserError, match=r"val_000002\.bin is no token shard"):  # not complete
        Split("val", [tmp_path / "val_000002.bin"], 256)
    writer.finish()
    assert [s["tokens"] for s in writer.shards] == [4, 4, 3]
    for shard in writer.shards:
        raw = (tmp_path / shard["file"]).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == shard["sha256"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [s["file"] for s in writer.shards]


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 50), n=st.integers(0, 50))
def test_reading_crosses_shards(counting, start, n):
    n = min(n, 50 - start)
    assert counting(50).read(start, n).tolist() == list(range(start, start + n))


def test_reading_past_the_end_is_an_error(counting):
    for start, n in ((49, 2), (50, 1), (51, 1)):
        with pytest.raises(IndexError):
            counting(50).read(start, n)


# ----------------------------------------------------------------------------------- broken shards


@pytest.mark.parametrize("damage, message", (
    (lambda raw: raw[:-1], "torn: its 5 tokens make 1,034 bytes, but it has 1,033"),
    (lambda raw: raw + b"\0\0", "torn"),
    (lambda raw: raw[:500], "torn"),
    (lambda raw: raw[1024:], "no token shard.*nanoGPT"),  # tokens without a header
    (lambda raw: b"", "no token shard"),
    (lambda raw: raw[:4] + b"\7" + raw[5:], "no token shard: .* 20240520, 7"),
    (lambda raw: raw[:8] + struct.pack("<i", -1) + raw[12:1022], "torn: its -1 tokens"),
    (lambda raw: raw[:8] + struct.pack("<i", 2**31 - 1) + raw[12:], "torn"),
))
def test_a_damaged_shard_is_named(tmp_path, damage, message):
    split_of(tmp_path, range(15), shard_tokens=5)
    path = tmp_path / "train_000001.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=rf"train_000001\.bin is {message}"):
        Split("train", sorted(tmp_path.iterdir()), 256)


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match=r"train_000007\.bin is missing"):
        Split("train", [tmp_path / "train_000007.bin"], 256)


def test_shards_of_two_kinds_are_one_array(tmp_path):
    split_of(tmp_path, range(5), name="a")
    split_of(tmp_path, range(5, 9), name="b", vocab_size=70_000)
    split = Split("train", sorted(tmp_path.iterdir()), 256)
    assert split.read(0, 9).tolist() == list(range(9))


@pytest.mark.parametrize("position", (0, 99_999, 100_000, 199_999, 200_000))
def test_an_id_beyond_the_vocabulary_is_named(tmp_path, position):
    tokens = np.zeros(200_001, dtype=np.int64)
    tokens[position] = 120
    shard, within = divmod(position, 100_000)
    message = rf"train_00000{shard}\.bin: token {within} has id 120, .* 65 ids"
    with pytest.raises(UserError, match=message):
        split_of(tmp_path, tokens, shard_tokens=100_000, vocab_size=65)


def test_an_id_that_the_sample_missed_is_named_when_read(tmp_path):
    tokens = np.zeros(200_000, dtype=np.int64)
    tokens[4097] = 120  # between the first two chunks that opening looks at
    split = split_of(tmp_path, tokens, shard_tokens=10**6, vocab_size=65)
    with pytest.raises(UserError, match="token 4097 has id 120"):
        for first in range(0, windows_per_epoch(split, 64), 100):
            split.rows(first, 100, 64, seed=1)
    with pytest.raises(UserError, match="token 4097 has id 120"):
        split.window(0, 100, 64)


def test_a_shard_cut_while_in_use_is_named(tmp_path):
    split = split_of(tmp_path, range(100))
    with open(tmp_path / "train_000000.bin", "r+b") as file:
        file.truncate(1100)
    with pytest.raises(UserError, match="cut while in use"):
        split.read(0, 100)


def test_a_short_split_is_refused_with_remedies(counting):
    split = counting(16)
    message = r"train split has 16 tokens.*--block_size=16 needs 17; set a smaller.*more text"
    for refuse in (lambda: split.require(16), lambda: split.rows(0, 1, 16, seed=1)):
        with pytest.raises(UserError, match=message):
            refuse()
    split.require(15)
    assert sorted(split.rows(0, 1, 15, seed=1)[0]) == list(range(16))


# ------------------------------------------------------------------------------------ training rows


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_the_permutation_is_one(size, seed):
    key = np.full(size, seed, dtype=np.uint64)
    assert sorted(permute(np.arange(size, dtype=np.uint64), key, size)) == list(range(size))


def test_the_permutation_is_even():
    """Over many keys each of 6 places sends each number everywhere: chi-square, 25 degrees."""
    keys = np.arange(6000, dtype=np.uint64) << np.uint64(32)
    counts = [np.bincount(permute(np.full(6000, i, np.uint64), keys, 6).astype(int), minlength=6)
              for i in range(6)]
    assert ((np.array(counts) - 1000) ** 2 / 1000).sum() < 60  # p < 1e-4


def test_neighbours_do_not_stay_together():
    order = permute(np.arange(10_000, dtype=np.uint64), np.full(10_000, 7, np.uint64), 10_000)
    steps = np.diff(order.astype(np.int64))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert (abs(steps) < 100).mean() < 0.04  # 2% by chance


def test_the_order_never_changes():
    """A resumed run depends on it: these numbers were written down in the first version."""
    assert window_starts(0, 12, n_tokens=63, block_size=10, seed=1337) == [
        52, 22, 32, 42, 12, 7, 17, 47, 27, 37, 29, 39]
    assert window_starts(10**12, 3, n_tokens=64 * 10**6 + 71, block_size=64, seed=0) == [
        19443826, 51714354, 57372722]


@settings(max_examples=50, deadline=None)
@given(n_tokens=st.integers(2, 60), block_size=st.integers(1, 8), seed=st.integers(0, 2**32),
       first=st.integers(0, 3000), cuts=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_a_row_depends_on_seed_and_index_only(counting, n_tokens, block_size, seed, first, cuts):
    split, n_tokens = counting(n_tokens), n_tokens
    block_size = min(block_size, n_tokens - 1)
    whole = split.rows(first, sum(cuts), block_size, seed)
    assert whole.shape == (sum(cuts), block_size + 1) and whole.dtype == np.int64
    parts, at = [], first
    for cut in cuts:
        parts.append(split.rows(at, cut, block_size, seed))
        at += cut
    assert np.array_equal(np.concatenate(parts), whole)
    assert (np.diff(whole, axis=1) == 1).all()  # each row is a window of the counting tokens


@settings(max_examples=50, deadline=None)
@given(n_tokens=st.integers(2, 60), block_size=st.integers(1, 8), seed=st.integers(0, 2**32),
       epoch=st.integers(0, 50))
def test_an_epoch_repeats_no_target(counting, n_tokens, block_size, seed, epoch):
    split, block_size = counting(n_tokens), min(block_size, n_tokens - 1)
    windows = windows_per_epoch(split, block_size)
    rows = split.rows(epoch * windows, windows, block_size, seed)
    targets = rows[:, 1:].ravel()
    assert len(set(targets.tolist())) == len(targets) == windows * block_size
    missed = n_tokens - 1 - len(targets)
    assert missed < 2 * block_size  # at the ends, by the epoch's offset


@settings(max_examples=20, deadline=None)
@given(n_tokens=st.integers(2, 60), block_size=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_every_token_gets_its_turn(counting, n_tokens, block_size, seed):
    split, block_size = counting(n_tokens), min(block_size, n_tokens - 1)
    epochs = 400  # of 16 offsets at most: one is missed with probability 16 * (15/16)**400
    rows = split.rows(0, epochs * windows_per_epoch(split, block_size), block_size, seed)
    assert set(rows.ravel().tolist()) == set(range(n_tokens))
    assert set(rows[:, 1:].ravel().tolist()) == set(range(1, n_tokens))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_much_does_not_swell_memory(tmp_path):
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    split_of(tmp_path, [0])
    with open(tmp_path / "train_000000.bin", "r+b") as file:  # 200 MB of zeros, on disk a few kB
        file.seek(8)
        file.write(struct.pack("<i", 10**8))
        file.truncate(1024 + 2 * 10**8)
    split = Split("train", [tmp_path / "train_000000.bin"], 256)
    split.rows(0, 100, 1024, seed=1)
    before = resident()
    for first in range(0, windows_per_epoch(split, 1024), 100):
        split.rows(first, 100, 1024, seed=1)
    assert resident() - before < 20e6


def test_epochs_and_seeds_differ(counting):
    split = counting(60)
    windows = windows_per_epoch(split, 2)
    orders = [split.rows(e * windows, windows, 2, seed)[:, 0].tolist() for seed in (1, 2, 1338)
              for e in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


# ------------------------------------------------------------------------------- evaluation windows


@settings(max_examples=100, deadline=None)
@given(n_tokens=st.integers(1, 60), block_size=st.integers(1, 70), n=st.integers(1, 9))
def test_every_token_but_the_first_is_a_target_once(counting, n_tokens, block_size, n):
    split = counting(n_tokens)
    windows = split.fixed_windows(block_size)
    assert windows == -(-(n_tokens - 1) // block_size)
    x, y = zip(*[split.window(i, n, block_size) for i in range(0, windows + 1, n)], strict=True)
    x, y = np.concatenate(x), np.concatenate(y)
    assert x.shape == y.shape and x.shape[1] == block_size and x.dtype == y.dtype == np.int64
    real = y >= 0
    assert y[real].tolist() == list(range(1, n_tokens))
    assert (x[real] == y[real] - 1).all()
    assert (x[~real] == 0).all() and (y[~real] == -1).all()
    assert not real[windows:].any()  # past the end nothing counts


# -------------------------------------------------------------------------------------- the dataset


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. 😀" * 50, encoding="utf-8")
    return prepare([str(tmp_path / "text.txt")], "mine", "bpe:270", say=lambda line: None)


def test_a_prepared_folder_opens(prepared):
    dataset = Dataset(prepared)
    meta = json.loads((prepared / "dataset.json").read_text(encoding="utf-8"))
    assert dataset.meta == meta and dataset.vocab_size == meta["vocab_size"]
    assert dataset.separator == dataset.tokenizer.eot == meta["separator"]
    text = dataset.tokenizer.decode(dataset.train.read(0, dataset.train.n_tokens))
    assert text == "<|endoftext|>" + ("the cat sat on the mat. 😀" * 50)[:1125]
    assert len(dataset.hash) == 64 and dataset.hash == Dataset(prepared).hash


def test_byte_lengths_sum_to_the_bytes_of_the_text(prepared):
    dataset = Dataset(prepared)
    lengths = dataset.token_byte_lengths()
    assert lengths.dtype == np.int64 and lengths.shape == (dataset.vocab_size,)
    assert lengths[dataset.separator] == 0
    for split in (dataset.train, dataset.val):
        ids = split.read(0, split.n_tokens)
        assert lengths[ids].sum() == dataset.meta["splits"][split.name]["bytes"]


def test_a_foreign_tokenizer_is_refused(prepared, tmp_path):
    (tmp_path / "other.txt").write_text("colourless green ideas" * 9, encoding="utf-8")
    other = prepare([str(tmp_path / "other.txt")], "other", "bpe:270", say=lambda line: None)
    (other / "tokenizer.json").replace(prepared / "tokenizer.json")
    with pytest.raises(UserError, match="not the tokenizer that made"):
        Dataset(prepared)


def test_a_foreign_shard_is_refused(prepared):
    split_of(prepared, [1, 2, 3], vocab_size=270)
    with pytest.raises(UserError, match=r"train shards hold 3 tokens, but dataset\.json says"):
        Dataset(prepared)


@pytest.mark.parametrize("change", (
    {"format": 2}, {"format": None}, {"tokenizer_hash": None}), ids=str)
def test_a_broken_description_is_refused(prepared, change):
    meta = json.loads((prepared / "dataset.json").read_text(encoding="utf-8")) | change
    (prepared / "dataset.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(UserError, match="prepare the dataset again"):
        Dataset(prepared)


def test_a_missing_tokenizer_or_shard_is_named(prepared):
    (prepared / "val_000000.bin").unlink()
    with pytest.raises(UserError, match=r"val_000000\.bin is missing"):
        Dataset(prepared)
    (prepared / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Dataset(prepared)


def test_published_shards_work_as_they_are(tmp_path, gpt2_offline):
    for name in ("fineweb_train_000001", "fineweb_train_000002", "fineweb_val_000000"):
        split_of(tmp_path, [50256, 31373, 995], name=name, vocab_size=50257)
        (tmp_path / f"{name}_000000.bin").rename(tmp_path / f"{name}.bin")
    dataset = Dataset(tmp_path)
    assert (dataset.train.n_tokens, dataset.val.n_tokens, dataset.separator) == (6, 3, 50256)
    assert dataset.tokenizer.decode(dataset.val.read(1, 2)) == "hello world"
    (tmp_path / "fineweb_train_000002.bin").rename(tmp_path / "train_evaluation.bin")
    assert Dataset(tmp_path).train.n_tokens == 6 and Dataset(tmp_path).val.n_tokens == 3
    with pytest.raises(UserError, match="has id 50256"):
        Dataset(tmp_path, "byte")
    with pytest.raises(UserError, match="has id 50256"):
        Dataset(tmp_path, "bpe:2048")
    (tmp_path / "fineweb_val_000000.bin").unlink()
    with pytest.raises(UserError, match="nor val shards"):
        Dataset(tmp_path)


def test_a_folder_without_shards_is_refused_at_once(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"neither dataset\.json nor train shards"):
            Dataset(folder)
