"""Tokenizers: bytes, or the byte-level BPE of a `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
END_TEXT = "<|endoftext|>"
KINDS = ("byte", "bpe")
# End tokens of models of the Hub; the first that exists is used.
_ENDS = (END_TEXT, "<|im_end|>", "</s>", "<|end_of_text|>", "<eos>")


class TextTokenizer(Protocol):
    """Turns text into tokens and back."""

    kind: str  # as `tokens.json` names it
    vocab_size: int  # tokens are 0 to vocab_size - 1
    end: int | None  # follows each file's text; it has no text of its own
    token_bytes: tuple[int, ...]  # bytes of text of each token

    def encode(self, text: bytes) -> np.ndarray:
        """Return [n] int64, without an end."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text, with a mark in place of bytes that are not UTF-8."""
        ...


class ByteTokenizer(TextTokenizer):
    """A token for each byte, and 256 for the end."""

    kind, vocab_size, end = "byte", 257, 256
    token_bytes = (*[1] * 256, 0)

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int64)

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t != self.end).decode("utf-8", errors="replace")


class BpeTokenizer(TextTokenizer):
    """Byte-level BPE of Hugging Face's `tokenizers`: any UTF-8 text is restored exactly."""

    kind = "bpe"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # An end that a text spells out is text, of that many bytes; the file does not keep this.
        tokenizer.encode_special_tokens = True
        self.vocab_size = tokenizer.get_vocab_size()
        self.end = tokenizer.token_to_id(END_TEXT)
        # Its alphabet has one character for each byte.
        names = (tokenizer.id_to_token(token) for token in range(self.vocab_size))
        self.token_bytes = tuple(0 if name == END_TEXT else len(name or "") for name in names)

    def encode(self, text: bytes) -> np.ndarray:
        encoding = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        return np.array(encoding.ids, np.int64)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write it, for `load_tokenizer` and the library."""
        self._tokenizer.save(str(path))


class SharedTokenizer(TextTokenizer):
    """A `tokenizer.json` next to weights of the Hub, whose special tokens count as such.

    `end` is the usual token that ends a text, or None if it has none.
    """

    kind = "shared"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        ends = (tokenizer.token_to_id(name) for name in _ENDS)
        self.end = next((end for end in ends if end is not None), None)

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._tokenizer.encode(text.decode("utf-8")).ids, np.int64)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def read_shared_tokenizer(path: Path) -> SharedTokenizer | None:
    """Read a tokenizer.json; None, with a warning, if `tokenizers` is missing or fails.

    The model then takes numbers of tokens.
    """
    try:
        from tokenizers import Tokenizer

        return SharedTokenizer(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing narrower
        get_logger().warning("%s cannot be read, so prompts are numbers of tokens: %s", path, error)
        return None


def load_tokenizer(kind: str, directory: Path) -> TextTokenizer:
    """Load the tokenizer of a directory of tokens.

    Raises:
      UserError: its file is missing or broken, or the kind is unknown.
    """
    if kind == "byte":
        return ByteTokenizer()
    path = directory / TOKENIZER_FILE
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(f"{path} needs a package; pip install tokenizers") from error
    if not path.is_file():
        raise UserError(f"{directory} holds no {TOKENIZER_FILE} for tokenizer {kind!r}; copy it")
    try:
        return BpeTokenizer(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path} cannot be read ({error}); copy it again") from error
