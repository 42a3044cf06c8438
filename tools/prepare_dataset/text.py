"""Any text files, or the sources of Python's own standard library, as tokens."""

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
from utils.storage.json_files import write_json

STDLIB = "stdlib"
SPLITS = ("validation", "test", "train")
# Tests of the library are not on every machine, and full of data that is no text.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT = 0.05
_VOCAB_SIZE = 4096


@dataclass(frozen=True)
class TextFile:
    """A file and its name below the folder that was given."""

    name: str
    text: bytes


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand `text`."""
    text = commands.add_parser("text", help="text files, or Python's standard library, as tokens")
    text.add_argument(
        "--from", dest="sources", nargs="+", required=True, metavar="PATH",
        help=f"files and folders of UTF-8 text; {STDLIB}: the sources of Python's own library",
    )  # fmt: skip
    text.add_argument("--tokenizer", choices=KINDS, default="byte", help="default: byte")
    text.add_argument(
        "--vocab-size", type=int, metavar="N",
        help=f"tokens of bpe, learnt from the training files (default {_VOCAB_SIZE})",
    )  # fmt: skip
    text.add_argument(
        "--held-out", type=float, default=_HELD_OUT, metavar="SHARE",
        help=f"share of the bytes for validation, and for test (default {_HELD_OUT})",
    )  # fmt: skip
    text.add_argument("--out", required=True, metavar="DIR", help="data root to write below")
    text.add_argument("--name", default="", help="of the directory; default: text_TOKENIZER")
    text.set_defaults(prepare=prepare_text)


def prepare_text(arguments: argparse.Namespace) -> str:
    """Write the tokens of each split, and what says how; gives the line to print."""
    size = _get_vocab_size(arguments)
    first = STDLIB if arguments.sources == [STDLIB] else "text"
    target = write.get_root(arguments.out) / (arguments.name or f"{first}_{arguments.tokenizer}")
    files, left_out = read_files(arguments.sources)
    splits = split_files(files, arguments.held_out)
    made_of = {
        "files_sha256": _hash_files(files), "held_out": arguments.held_out, "asked_vocab": size,
        "tokenizer": arguments.tokenizer,
    }  # fmt: skip
    if target.exists():
        return _describe_existing(target, made_of)
    tokenizer = create_tokenizer(arguments.tokenizer, splits["train"], size)
    working = target.with_name(f".{target.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    facts = {split: write_split(working, split, splits[split], tokenizer) for split in SPLITS}
    index = {
        "format": FORMAT, "vocab_size": tokenizer.vocab_size, "dtype": _choose_dtype(tokenizer),
        "tokenizer": tokenizer.kind, "end": tokenizer.end, "splits": facts,
        "source": {**made_of, "python": platform.python_version() if first == STDLIB else ""},
        "token_bytes": list(tokenizer.token_bytes),
    }  # fmt: skip
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.save(working / TOKENIZER_FILE)
        learnt = hashlib.sha256((working / TOKENIZER_FILE).read_bytes()).hexdigest()
        index["tokenizer_hash"] = learnt[:16]
    write_json(working / INDEX_FILE, index, indent=1)
    working.rename(target)
    counted = ", ".join(f"{facts[one]['tokens']:,} tokens of {one}" for one in reversed(SPLITS))
    return f"{target}: {counted}; {len(files)} files{_describe_left_out(left_out)}" + (
        f"; the training files gave {tokenizer.vocab_size:,} tokens of the {size:,} of --vocab-size"
        if tokenizer.vocab_size < size
        else ""
    )


def read_files(sources: Sequence[str]) -> tuple[list[TextFile], dict[str, int]]:
    """Files of UTF-8 by name, each content once, and how many were left out for which reason.

    Raises:
      UserError: a path is not there, or there is nothing to read.
    """
    found: dict[bytes, TextFile] = {}
    left_out = {"empty": 0, "no UTF-8": 0, "the same as another": 0}
    for name, path in sorted(_list_files(sources)):
        text = path.read_bytes()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if not text.strip():
            left_out["empty"] += 1
        elif not _is_text(text):
            left_out["no UTF-8"] += 1
        elif digest in found:
            left_out["the same as another"] += 1
        else:
            found[digest] = TextFile(name, text)
    if len(found) < len(SPLITS):
        raise UserError(
            f"--from ({' '.join(sources)}) has {len(found)} files of text, but no file may be in "
            "two of the splits train, validation and test; give three files or more"
        )
    return list(found.values()), left_out


def split_files(files: Sequence[TextFile], held_out: float) -> dict[str, list[TextFile]]:
    """Whole files by split, in the order of a hash of their names: fixed, and no file in two.

    Args:
      held_out: share of all bytes for validation, and for test; each gets one file at least.
    """
    if not 0 < held_out < 0.5:
        raise UserError(f"--held-out ({held_out:g}) must lie between 0 and 0.5; 0.05 is usual")
    rest = sorted(files, key=lambda one: hashlib.blake2b(one.name.encode()).digest())
    wanted = held_out * sum(len(one.text) for one in files)
    splits: dict[str, list[TextFile]] = {}
    for number, split in enumerate(SPLITS[:2]):
        chosen: list[TextFile] = []
        while sum(len(one.text) for one in chosen) < wanted and len(rest) > 2 - number:
            chosen.append(rest.pop(0))
        splits[split] = chosen
    return {**splits, "train": rest}


def create_tokenizer(kind: str, files: Sequence[TextFile], size: int) -> TextTokenizer:
    """A tokenizer; one that is learnt sees these files alone."""
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
    tokenizer.train_from_iterator((one.text.decode("utf-8") for one in files), trainer)
    return BpeTokenizer(tokenizer)


def write_split(
    folder: Path, split: str, files: Iterable[TextFile], tokenizer: TextTokenizer
) -> dict[str, int | str]:
    """Write the tokens of files one after the other, an end behind each; gives their facts.

    Raises:
      UserError: tokens of a file do not stand for all its bytes, which bits a byte are counted by.
    """
    digest, tokens, size, count = hashlib.sha256(), 0, 0, 0
    token_bytes = np.array(tokenizer.token_bytes)
    kind = np.dtype(_choose_dtype(tokenizer)).newbyteorder("<")
    with (folder / f"{split}.bin").open("wb") as out:
        for one in files:
            encoded = tokenizer.encode(one.text)
            _check_bytes(one, int(token_bytes[encoded].sum()))
            found = np.append(encoded, tokenizer.end).astype(kind)
            digest.update(found.tobytes())
            out.write(found.tobytes())
            tokens, size, count = tokens + len(found), size + len(one.text), count + 1
    return {"tokens": tokens, "bytes": size, "files": count, "sha256": digest.hexdigest()}


def _check_bytes(file: TextFile, found: int) -> None:
    if found != len(file.text):
        raise UserError(
            f"--from: tokens of {file.name} stand for {found} bytes of its {len(file.text)}; leave "
            "the file out, or take --tokenizer byte"
        )


def _get_vocab_size(arguments: argparse.Namespace) -> int:
    if arguments.tokenizer == "byte":
        if arguments.vocab_size is not None:
            raise UserError(
                f"--vocab-size ({arguments.vocab_size}) means nothing to --tokenizer byte, which "
                "has 257 tokens; leave it out"
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
    """(name, path) of all files; names begin below the folder that was given."""
    found: list[tuple[str, Path]] = []
    for source in sources:
        if source == STDLIB:
            base = Path(sysconfig.get_paths()["stdlib"])
            found += [(name, path) for name, path in _walk(base) if path.suffix == ".py"]
        elif Path(source).is_file():
            found.append((source, Path(source)))
        elif Path(source).is_dir():
            found += _walk(Path(source))
        else:
            raise UserError(f"--from ({source}): no such file or directory; name what is there")
    return found


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
    for one in files:
        digest.update(f"{one.name}\0{len(one.text)}\0".encode() + one.text)
    return digest.hexdigest()


def _describe_existing(target: Path, made_of: dict[str, object]) -> str:
    """The line for a dataset that is there; refuses one of other files or another tokenizer."""
    try:
        source = json.loads((target / INDEX_FILE).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{target} is there and is no dataset of text; give --name") from error
    if any(source.get(name) != value for name, value in made_of.items()):
        raise UserError(f"{target} is there, made of other files or flags; give another --name")
    print(f"{target} is there already", file=sys.stderr)
    return str(target)


def _describe_left_out(left_out: dict[str, int]) -> str:
    told = [f"{count} {reason}" for reason, count in left_out.items() if count]
    return f"; left out: {', '.join(told)}" if told else ""
