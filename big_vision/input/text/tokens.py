"""Tokenised text: a memory-mapped file for each split, and `tokens.json`, which describes them.

    data.root / data.name / train.bin validation.bin test.bin tokens.json [tokenizer.json]

A `.bin` holds only tokens, uint16 or uint32, little-endian. Window i of a split is
tokens[i * T : i * T + T + 1]: every token but the first is predicted once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from big_vision.input.selection import Selection
from big_vision.input.source import SPLIT_KEYS, Reading, Role, Source
from big_vision.input.text.windows import TokenFacts, WindowReader
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue, is_count
from utils.storage.places import is_remote, to_path

INDEX_FILE = "tokens.json"
FORMAT = "tokens-1"
DTYPES = ("uint16", "uint32")
# Tokens at a file's beginning that are checked against the vocabulary before a device is used.
_CHECKED = 1 << 24
_WAY = "make the directory by python -m tools.prepare_dataset text"


def _is_list_of_counts(value: JsonValue) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _tells_splits(value: JsonValue) -> bool:
    return isinstance(value, dict) and all(
        isinstance(split, dict) and is_count(split.get("tokens")) for split in value.values()
    )


# Values that the index may omit.
_DEFAULTS: JsonObject = {"tokenizer_hash": "", "token_bytes": []}
# Name in the index -> what it must be, and a check of that.
_RULES: dict[str, tuple[str, Callable[[JsonValue], bool]]] = {
    "vocab_size": ("a whole number above 0", lambda value: is_count(value) and value != 0),
    "dtype": ("a text", lambda value: isinstance(value, str)),
    "tokenizer": ("a text", lambda value: isinstance(value, str)),
    "tokenizer_hash": ("a text", lambda value: isinstance(value, str)),
    "end": ("a token or null", lambda value: value is None or is_count(value)),
    "token_bytes": ("a list of whole numbers", _is_list_of_counts),
    "splits": ("an object for each split, with its number of 'tokens'", _tells_splits),
}


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Contents of `tokens.json`."""

    vocab_size: int
    dtype: str
    tokenizer: str  # byte or bpe, or another's name
    tokenizer_hash: str  # of a trained tokenizer; empty if it is not trained
    end: int | None  # token that follows each file's text
    token_bytes: tuple[int, ...]  # bytes of text of each token; empty if unknown
    splits: dict[str, JsonObject]  # tokens, bytes, files and sha256 by split


def read_token_index(directory: Path, key: str = "data.root") -> TokenIndex:
    """Read the index of a directory of tokens.

    Args:
      key: the configuration's, for errors.

    Raises:
      UserError: it is missing or of another format.
    """
    path = directory / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{key}: {directory} holds no {INDEX_FILE}; {_WAY}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error}); {_WAY}") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise UserError(f"{key}: {path} is of format {version!r}, not {FORMAT!r}; {_WAY}")
    values: JsonObject = {name: content.get(name, _DEFAULTS.get(name)) for name in _RULES}
    for name, (rule, is_right) in _RULES.items():
        if not is_right(values[name]):
            raise UserError(
                f"{key}: {path} lacks or garbles {name!r}, which must be {rule}; {_WAY}"
            )
    values["token_bytes"] = tuple(values["token_bytes"])
    index = TokenIndex(**values)
    if index.dtype not in DTYPES or len(index.token_bytes) not in (0, index.vocab_size):
        raise UserError(
            f"{key}: {path} must name a dtype of {', '.join(DTYPES)} (it has {index.dtype!r}) and "
            f"as many token_bytes as vocab_size ({index.vocab_size}) or none; {_WAY}"
        )
    return index


@dataclass(frozen=True, kw_only=True)
class TokenSelection(Selection):
    """Windows of one file, whose bytes have the `sha256` of the index."""

    path: Path
    index: TokenIndex
    sha256: str

    @property
    def files_hash(self) -> str:
        return self.sha256[:16]

    def count_common(self, other: TokenSelection) -> int:
        """Count all windows if the file or its content is the same; otherwise none."""
        same_content = bool(self.sha256) and self.sha256 == other.sha256
        return other.num_examples if same_content or self.path == other.path else 0


class TokenSource(Source[TokenSelection]):
    """Text that `tools.prepare_dataset text` has tokenised."""

    @property
    def directory(self) -> Path:
        """Return the directory of the files; UserError if data.root is missing, or a URL."""
        if not self.data.root:
            raise UserError("data.source=tokens needs data.root, the directory of tokens.json")
        if is_remote(self.data.root):
            raise UserError(
                f"data.root ({self.data.root!r}) is a URL, but tokens are mapped from a local "
                "disk; copy the directory to the same path of every machine (from a bucket: "
                "gcloud storage cp -r) and give that path"
            )
        return to_path(self.data.root) / self.data.name

    @property
    def title(self) -> str:
        return self.data.name or self.directory.name

    def select(self, role: Role) -> TokenSelection:
        """Select the windows of a split's file, after checking its size and first tokens."""
        index, key = read_token_index(self.directory), f"data.{SPLIT_KEYS[role]}"
        split = getattr(self.data, SPLIT_KEYS[role])
        if split not in index.splits:
            raise UserError(
                f"{key} ({split!r}) is not a split of {self.directory}; "
                f"{get_hint(split, index.splits)}"
            )
        path = self.directory / f"{split}.bin"
        tokens = open_tokens(path, index)
        length = self.data.sequence_length
        if len(tokens) <= length:
            raise UserError(
                f"data.sequence_length ({length}) leaves no window in the {len(tokens)} tokens of "
                f"{key} ({split}); lower it, or choose a larger split"
            )
        return TokenSelection(
            num_examples=(len(tokens) - 1) // length,
            path=path,
            index=index,
            sha256=str(index.splits[split].get("sha256", "")),
        )

    def describe(self, selection: TokenSelection, role: Role) -> TokenFacts:
        index = selection.index
        return TokenFacts(
            index.vocab_size,
            self.data.sequence_length,
            tokenizer=" ".join(filter(None, (index.tokenizer, index.tokenizer_hash))),
            token_bytes=index.token_bytes,
        )

    def open(self, selection: TokenSelection, reading: Reading) -> TokenReader:
        return TokenReader(selection, self.describe(selection, reading.role), reading)


def open_tokens(path: Path, index: TokenIndex) -> np.ndarray:
    """Map the tokens of a file into memory.

    Raises:
      UserError: it is missing, ends within a token, has another size than in the index, or begins
        with tokens outside the vocabulary.
    """
    kind = np.dtype(index.dtype).newbyteorder("<")
    count = index.splits[path.stem].get("tokens")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {_WAY} again") from error
    if size % kind.itemsize:
        raise UserError(
            f"{path} ends within a token: {size} bytes are no whole number of {index.dtype}; copy "
            "it again"
        )
    if size != (count or 0) * kind.itemsize:
        raise UserError(
            f"{path} holds {size // kind.itemsize} tokens, but {INDEX_FILE} says {count}; copy "
            "both again"
        )
    tokens = np.memmap(path, kind, mode="r")
    check_vocabulary(tokens[:_CHECKED], index.vocab_size, str(path))
    return tokens


def check_vocabulary(tokens: np.ndarray, vocab_size: int, source: str) -> None:
    """Raise a UserError for tokens outside the vocabulary, with the position of the first."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        first = int(np.flatnonzero(tokens.ravel() >= vocab_size)[0])
        raise UserError(
            f"{source}: token {int(tokens.ravel()[first])} at place {first} is beyond the "
            f"vocabulary of {vocab_size} in {INDEX_FILE}; {_WAY} again"
        )


class TokenReader(WindowReader):
    """Reads windows of one mapped file."""

    def __init__(self, selection: TokenSelection, facts: TokenFacts, reading: Reading) -> None:
        super().__init__(selection, facts, reading)
        self._selection = selection
        self._tokens = open_tokens(selection.path, selection.index)

    def load_windows(self, indices: np.ndarray) -> np.ndarray:
        """Return [n, T + 1] of the file's type, after checking the rest of a large file."""
        length = self.facts.sequence_length
        windows = self._tokens[indices[:, None] * length + np.arange(length + 1)]
        if len(self._tokens) > _CHECKED:
            check_vocabulary(windows, self.facts.vocab_size, f"windows of {self._selection.path}")
        return windows

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return tuple(f"{self._selection.path.stem}__{index}" for index in indices)

    def describe(self, index: int) -> str:
        return f"window {index} of {self._selection.path}"

    def close(self) -> None:
        self._tokens = self._tokens[:0]
