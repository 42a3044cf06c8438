"""Text files, or the sources of Python's standard library, as tokens."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from big_vision.input.text.tokenizer import (
    END_TEXT,
    KINDS,
    TOKENIZER_FILE,
    BpeTokenizer,
    ByteTokenizer,
    TextTokenizer,
)
from big_vision.input.text.tokens import DTYPES, FORMAT, INDEX_FILE
from tools.prepare_dataset import write
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.json_files import write_json

STDLIB = "stdlib"
SPLITS = ("validation", "test", "train")
# Tests of the library are not on every machine, and contain binary data.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_VOCAB_SIZE = 4096


@dataclass(frozen=True)
class TextFile:
    """A file and its name below the given folder."""

    name: str
    text: bytes


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `text`."""
    text = commands.add_parser("text", help="text files, or Python's standard library, as tokens")
    text.set_defaults(prepare=prepare_text)
    add = text.add_argument
    what = f"files and folders of UTF-8 text; {STDLIB}: the sources of Python's own library"
    add("--from", dest="sources", nargs="+", required=True, metavar="PATH", help=what)
    add("--tokenizer", choices=KINDS, default="byte", help="default: byte")
    what = f"tokens of bpe, learnt from the training files (default {_VOCAB_SIZE})"
    add("--vocab-size", type=int, metavar="N", help=what)
    what = "share of the bytes for validation, and for test (default %(default)s)"
    add("--held-out", type=float, default=0.05, metavar="SHARE", help=what)
    add("--out", required=True, metavar="DIR", help="data root to write below")
    add("--name", default="", help="of the directory; default: text_TOKENIZER")


def prepare_text(arguments: argparse.Namespace) -> str:
    """Write the tokens of each split and the index; return the line to print."""
    size = _get_vocab_size(arguments)
    first = STDLIB if arguments.sources == [STDLIB] else "text"
    target = write.get_root(arguments.out) / (arguments.name or f"{first}_{arguments.tokenizer}")
    files, left_out = read_files(arguments.sources)
    splits = split_files(files, arguments.held_out)
    made_of = {
        "files_sha256": _hash_files(files),
        "held_out": arguments.held_out,
        "asked_vocab": size,
        "tokenizer": arguments.tokenizer,
    }
    if target.exists():
        return _describe_existing(target, made_of)
    tokenizer = create_tokenizer(arguments.tokenizer, splits["train"], size)
    working = target.with_name(f".{target.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    facts = {split: write_split(working, split, splits[split], tokenizer) for split in SPLITS}
    index = {
        "format": FORMAT,
        "vocab_size": tokenizer.vocab_size,
        "dtype": _choose_dtype(tokenizer),
        "tokenizer": tokenizer.kind,
        "end": tokenizer.end,
        "splits": facts,
        "source": {**made_of, "python": platform.python_version() if first == STDLIB else ""},
        "token_bytes": list(tokenizer.token_bytes),
    }
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(working / TOKENIZER_FILE)
        digest = hashlib.sha256((working / TOKENIZER_FILE).read_bytes()).hexdigest()
        index["tokenizer_hash"] = digest[:16]
    write_json(working / INDEX_FILE, index, indent=1)
    working.rename(target)
    counts = ", ".join(f"{facts[name]['tokens']:,} tokens of {name}" for name in reversed(SPLITS))
    line = f"{target}: {counts}; {len(files)} files"
    if reasons := [f"{count} {reason}" for reason, count in left_out.items() if count]:
        line += f"; left out: {', '.join(reasons)}"
    if (learnt := tokenizer.vocab_size) < size:
        line += f"; the training files gave {learnt:,} tokens of the {size:,} of --vocab-size"
    return line


def read_files(sources: Sequence[str]) -> tuple[list[TextFile], dict[str, int]]:
    """Read files of UTF-8 by name, each content once, and count those left out by reason.

    A UserError if a path does not exist, or there is nothing to read.
    """
    files: dict[bytes, TextFile] = {}
    left_out = {"empty": 0, "no UTF-8": 0, "the same as another": 0}
    for name, path in sorted(_list_files(sources)):
        text = path.read_bytes()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if not text.strip():
            left_out["empty"] += 1
        elif not _is_text(text):
            left_out["no UTF-8"] += 1
        elif digest in files:
            left_out["the same as another"] += 1
        else:
            files[digest] = TextFile(name, text)
    if len(files) < len(SPLITS):
        raise UserError(
            f"--from ({' '.join(sources)}) has {len(files)} files of text, but no file may be in "
            "two of the splits train, validation and test; give three files or more"
        )
    return list(files.values()), left_out


def split_files(files: Sequence[TextFile], held_out: float) -> dict[str, list[TextFile]]:
    """Split whole files, in the order of a hash of their names.

    `held_out` is the share of all bytes for validation, and for test, each at least one file.
    """
    if not 0 < held_out < 0.5:
        raise UserError(f"--held-out ({held_out:g}) must lie between 0 and 0.5; 0.05 is usual")
    rest = sorted(files, key=lambda file: hashlib.blake2b(file.name.encode()).digest())
    wanted = held_out * sum(len(file.text) for file in files)
    splits: dict[str, list[TextFile]] = {}
    for number, split in enumerate(SPLITS[:2]):
        chosen: list[TextFile] = []
        while sum(len(file.text) for file in chosen) < wanted and len(rest) > 2 - number:
            chosen.append(rest.pop(0))
        splits[split] = chosen
    return {**splits, "train": rest}


def create_tokenizer(kind: str, files: Sequence[TextFile], size: int) -> TextTokenizer:
    """Create a tokenizer; bpe learns from these files."""
    if kind == "byte":
        return ByteTokenizer()
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise UserError("--tokenizer bpe needs a package; pip install tokenizers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((file.text.decode("utf-8") for file in files), trainer)
    return BpeTokenizer(tokenizer)


def write_split(
    folder: Path, split: str, files: Iterable[TextFile], tokenizer: TextTokenizer
) -> dict[str, int | str]:
    """Write the tokens of all files, an end after each; return the counts for the index.

    A UserError if a file's tokens do not cover all its bytes, which bits per byte count.
    """
    digest, tokens, size, count = hashlib.sha256(), 0, 0, 0
    token_bytes = np.array(tokenizer.token_bytes)
    dtype = np.dtype(_choose_dtype(tokenizer)).newbyteorder("<")
    with (folder / f"{split}.bin").open("wb") as out:
        for file in files:
            encoded = tokenizer.encode(file.text)
            covered = int(token_bytes[encoded].sum())
            if covered != len(file.text):
                raise UserError(
                    f"--from: tokens of {file.name} stand for {covered} bytes of its "
                    f"{len(file.text)}; leave the file out, or take --tokenizer byte"
                )
            ended = np.append(encoded, np.array(tokenizer.end)).astype(dtype).tobytes()
            digest.update(ended)
            out.write(ended)
            tokens, size, count = tokens + len(encoded) + 1, size + len(file.text), count + 1
    return {"tokens": tokens, "bytes": size, "files": count, "sha256": digest.hexdigest()}


def _get_vocab_size(arguments: argparse.Namespace) -> int:
    if arguments.tokenizer == "byte":
        if arguments.vocab_size is not None:
            raise UserError(
                f"--vocab-size ({arguments.vocab_size}) is not supported with --tokenizer byte, "
                "which has 257 tokens; remove it"
            )
        return ByteTokenizer.vocab_size
    size = _VOCAB_SIZE if arguments.vocab_size is None else arguments.vocab_size
    if size <= ByteTokenizer.vocab_size:
        raise UserError(
            f"--vocab-size ({size}) leaves no room beside the 256 bytes and the end; raise it"
        )
    return size


def _choose_dtype(tokenizer: TextTokenizer) -> str:
    return DTYPES[0] if tokenizer.vocab_size <= 1 << 16 else DTYPES[1]


def _list_files(sources: Sequence[str]) -> list[tuple[str, Path]]:
    """List (name, path) of all files; names are relative to the given folder."""
    files: list[tuple[str, Path]] = []
    for source in sources:
        if source == STDLIB:
            base = Path(sysconfig.get_paths()["stdlib"])
            files += [(name, path) for name, path in _walk(base) if path.suffix == ".py"]
        elif Path(source).is_file():
            files.append((source, Path(source)))
        elif Path(source).is_dir():
            files += _walk(Path(source))
        else:
            raise UserError(f"--from ({source}): no such file or directory; name what is there")
    return files


def _walk(base: Path) -> list[tuple[str, Path]]:
    names = [(path.relative_to(base), path) for path in base.rglob("*") if path.is_file()]
    return [
        (name.as_posix(), path)
        for name, path in names
        if not _SKIPPED & set(name.parts) and not any(part.startswith(".") for part in name.parts)
    ]


def _is_text(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _hash_files(files: Sequence[TextFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{len(file.text)}\0".encode() + file.text)
    return digest.hexdigest()


def _describe_existing(target: Path, made_of: JsonObject) -> str:
    """Return the line for an existing dataset; a UserError if it is of other files or flags."""
    try:
        source = json.loads((target / INDEX_FILE).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{target} exists and is no text dataset; change --name") from error
    if any(source.get(name) != value for name, value in made_of.items()):
        raise UserError(f"{target} is there, made of other files or flags; give another --name")
    print(f"{target} is there already", file=sys.stderr)
    return str(target)
