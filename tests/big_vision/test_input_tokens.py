"""Tokenised text: what the program writes, which windows are read, and broken files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import main
from big_vision.input.text.tokenizer import END_TEXT, ByteTokenizer, load_tokenizer
from big_vision.input.text.tokens import read_token_index
from datasets import Position, create_loader
from tests.support.language import create_language_argv, write_texts
from tools.prepare_dataset.__main__ import main as prepare
from tools.prepare_dataset.text import TextFile, write_split
from utils.config.data import DataSection
from utils.errors import UserError

FILES = 40


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Write the same synthetic files as bytes and as BPE tokens."""
    base = tmp_path_factory.mktemp("text")
    write_texts(base / "files", FILES)
    for flags in (["--tokenizer=byte"], ["--tokenizer=bpe", "--vocab-size=300"]):
        assert prepare(["text", "--from", str(base / "files"), "--out", str(base), *flags]) == 0
    return base


def read(root: Path, kind: str, split: str) -> np.ndarray:
    return np.fromfile(root / f"text_{kind}" / f"{split}.bin", "<u2")


def create_data(root: Path, **values) -> DataSection:
    return DataSection(
        source="tokens",
        root=str(root),
        name="text_byte",
        sequence_length=16,
        global_batch_size=8,
        return_id=True,
    ).model_copy(update=values)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_every_file_is_in_one_split_and_decodes_to_its_text(root, kind):
    tokenizer = load_tokenizer(kind, root / f"text_{kind}")
    index, found = read_token_index(root / f"text_{kind}"), []
    for split, facts in index.splits.items():
        tokens = read(root, kind, split)
        parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.end) + 1)
        assert not len(parts[-1]) and len(parts) == facts["files"] + 1
        texts = [tokenizer.decode(part.tolist()) for part in parts[:-1]]
        assert facts["tokens"] == len(tokens)
        assert facts["bytes"] == sum(len(text.encode()) for text in texts)
        assert facts["bytes"] == sum(index.token_bytes[token] for token in tokens)
        assert facts["sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
        found += texts
    written = [path.read_text() for path in (root / "files").iterdir()]
    assert sorted(found) == sorted(written)
    assert min(facts["files"] for facts in index.splits.values()) >= 1


def test_an_end_token_spelled_out_in_a_text_stays_text(tmp_path, capsys):
    """Read as an end token it would end a file in its middle and count as no bytes."""
    write_texts(tmp_path / "files", 5)
    for path in (tmp_path / "files").iterdir():
        path.write_text(path.read_text() + f"a {END_TEXT} b\n")
    argv = ["text", "--from", str(tmp_path / "files"), "--out", str(tmp_path), "--tokenizer=bpe"]
    assert prepare([*argv, "--vocab-size=300"]) == 0
    index = read_token_index(tmp_path / "text_bpe")
    for split, facts in index.splits.items():
        tokens = read(tmp_path, "bpe", split)
        assert (tokens == index.end).sum() == facts["files"]
        assert sum(index.token_bytes[token] for token in tokens) == facts["bytes"]
    tokenizer = load_tokenizer("bpe", tmp_path / "text_bpe")
    text = f"a {END_TEXT} b"
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text


def test_tokens_that_do_not_cover_the_whole_text_are_refused(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.token_bytes = (*[1] * 97, 0, *[1] * 158, 0)  # none for an "a"
    with pytest.raises(UserError, match=r"tokens of one.txt stand for 2 bytes of its 3; leave"):
        write_split(tmp_path, "train", [TextFile("one.txt", b"abc")], tokenizer)


def test_bpe_learns_from_training_files_only(root):
    """Each file repeats a word of its own: no other file's word has become one token."""
    tokenizer = load_tokenizer("bpe", root / "text_bpe")
    longest = {}
    for split in ("train", "test", "validation"):
        text = tokenizer.decode(read(root, "bpe", split).tolist())
        words = {word for word in text.split() if word.startswith("word")}
        longest[split] = np.mean([len(tokenizer.encode(word.encode())) for word in words])
    assert longest["train"] < longest["test"]
    assert longest["train"] < longest["validation"]


def test_duplicate_empty_and_binary_files_are_left_out(tmp_path, capsys):
    write_texts(tmp_path / "files", 5)
    for name, text in (
        ("same", b"".join([(tmp_path / "files" / "0.txt").read_bytes()])),
        ("empty", b" \n"),
        ("latin", b"\xe4\xf6"),
    ):
        (tmp_path / "files" / name).write_bytes(text)
    argv = ["text", "--from", str(tmp_path / "files"), "--out", str(tmp_path)]
    assert prepare(argv) == 0
    told = capsys.readouterr().out
    assert "5 files; left out: 1 empty, 1 no UTF-8, 1 the same as another" in told
    assert prepare(argv) == 0  # it is there, and made of the same
    (tmp_path / "files" / "more.txt").write_text("more")
    assert prepare(argv) == 2
    assert "made of other files or flags; give another --name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--from", "nowhere"], "--from (nowhere): no such file or directory"),
        (["--from", "FILES/0.txt"], "has 1 files of text, but no file may be in two"),
        (["--from", "FILES", "--vocab-size=300"], "is not supported with --tokenizer byte"),
        (["--from", "FILES", "--tokenizer=bpe", "--vocab-size=200"], "leaves no room"),
        (["--from", "FILES", "--held-out=0.7"], "--held-out (0.7) must lie between 0 and 0.5"),
    ],
)
def test_unpreparable_input_gives_a_one_line_error(root, tmp_path, capsys, flags, words):
    flags = [flag.replace("FILES", str(root / "files")) for flag in flags]
    assert prepare(["text", *flags, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0]


def test_a_vocabulary_smaller_than_requested_is_reported(root, tmp_path, capsys):
    argv = ["text", "--from", str(root / "files"), "--out", str(tmp_path), "--tokenizer=bpe"]
    assert prepare([*argv, "--vocab-size=1000000"]) == 0
    size = read_token_index(tmp_path / "text_bpe").vocab_size
    told = capsys.readouterr().out.strip()
    assert size < 1000000
    assert told.endswith(f"gave {size:,} tokens of the 1,000,000 of --vocab-size")


def test_consecutive_windows_share_one_token(root):
    loader = create_loader(create_data(root, global_batch_size=4), "eval", seed=0)
    tokens = read(root, "byte", "validation")
    assert loader.num_examples == (len(tokens) - 1) // 16
    windows = loader.load_examples(range(loader.num_examples)).tokens.numpy()
    assert (windows[1:, 0] == windows[:-1, -1]).all()
    whole = np.concatenate([windows[0, :1], windows[:, 1:].ravel()])
    assert (whole == tokens[: len(whole)]).all() and len(tokens) - len(whole) < 16


@pytest.mark.parametrize("count", [2, 4])
def test_any_shard_count_reads_the_same_global_batches_from_any_position(root, count):
    def read_batches(index: int, of: int, position: Position) -> list[torch.Tensor]:
        loader = create_loader(create_data(root), "train", seed=3, shard=(index, of))
        batches = loader.batches(position)
        return [next(batches).tokens for _ in range(6)]

    wanted = read_batches(0, 1, Position())
    shards = [read_batches(index, count, Position()) for index in range(count)]
    for number, batch in enumerate(wanted):
        assert torch.equal(torch.cat([shard[number] for shard in shards]), batch)
    resumed = read_batches(0, 1, Position(examples=16))
    assert all(torch.equal(one, other) for one, other in zip(resumed, wanted[2:], strict=False))


def _shorten(folder: Path) -> None:
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])


def _cut_whole_tokens(folder: Path) -> None:
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-20])


def _exceed(folder: Path) -> None:
    tokens = np.fromfile(folder / "validation.bin", "<u2")
    tokens[5] = 999
    tokens.tofile(folder / "validation.bin")


def _change_index(**values):
    def change(folder: Path) -> None:
        path = folder / "tokens.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


BROKEN = [
    (_shorten, (), "train.bin ends within a token: "),
    (_cut_whole_tokens, (), "tokens, but tokens.json says "),
    (_exceed, (), "validation.bin: token 999 at place 5 is beyond the vocabulary of 257"),
    (lambda folder: (folder / "tokens.json").unlink(), (), "holds no tokens.json; make the"),
    (lambda folder: (folder / "tokens.json").write_text("{"), (), "tokens.json cannot be read"),
    (_change_index(format="tokens-9"), (), "is of format 'tokens-9', not 'tokens-1'"),
    (_change_index(dtype="int8"), (), "must name a dtype of uint16, uint32 (it has 'int8')"),
    (_change_index(vocab_size="many"), (), "tokens.json lacks or garbles"),
    (_change_index(splits={"train": 5}), (), "lacks or garbles 'splits', which must be an object"),
    (_change_index(splits={"train": {"tokens": "9"}}), (), "with its number of 'tokens'"),
    (_change_index(token_bytes=["1"] * 257), (), "'token_bytes', which must be a list of whole"),
    (_change_index(vocab_size=True), (), "'vocab_size', which must be a whole number above 0"),
    (_change_index(end="no"), (), "'end', which must be a token or null"),
    (lambda folder: (folder / "train.bin").unlink(), (), "train.bin cannot be read"),
    (
        lambda folder: None,
        ("--data.sequence_length=99999",),
        "data.sequence_length (99999) leaves no window in the ",
    ),
    (lambda folder: None, ("--data.train_split=trian",), "split ('trian') is not a split"),
    (lambda folder: None, ("--data.root=",), "data.source=tokens needs data.root"),
    (
        lambda folder: None,
        ("--data.root=memory://x",),
        "data.root ('memory://x') is a URL, but tokens are mapped from a local disk; copy the",
    ),
]


@pytest.mark.parametrize(("damage", "flags", "words"), BROKEN)
def test_a_broken_dataset_gives_a_one_line_error(root, tmp_path, capsys, damage, flags, words):
    shutil.copytree(root / "text_byte", tmp_path / "copy")
    damage(tmp_path / "copy")
    own = ("--data.source=tokens", f"--data.root={tmp_path}", "--data.name=copy", "--check")
    assert main.main(create_language_argv(tmp_path / "runs", *own, *flags)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0]


def test_tokens_not_checked_at_the_start_are_checked_when_read(root, monkeypatch):
    monkeypatch.setattr("big_vision.input.text.tokens._CHECKED", 3)
    tokens = np.fromfile(root / "text_byte" / "validation.bin", "<u2")
    data = create_data(root)
    loader = create_loader(data, "eval", seed=0)
    assert loader.load_examples([1]).tokens.shape == (1, 17)
    loader._reader._tokens = np.where(np.arange(len(tokens)) == 20, 400, tokens)
    with pytest.raises(ValueError, match="token 400 at place 4 is beyond the vocabulary"):
        loader.load_examples([1])
