"""Finds probable secrets in texts before they are saved.

A false alarm is better than a miss: a refused patch costs a note, a saved secret can be read by
everyone who reads runs. Every repetition has a bound, so that the time is limited for any text.
"""

from __future__ import annotations

import math
import re
from collections import Counter

_PATTERNS = (
    ("a private key", r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY( BLOCK)?-----"),
    ("a cloud access key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("a key of Google", r"\bAIza[0-9A-Za-z_\-]{35}|\bGOCSPX-[0-9A-Za-z_\-]{6}"),
    ("an access token of Google", r"\bya29\.[0-9A-Za-z_\-]{20}"),
    ("a token of GitHub", r"\bgh[pousr]_[0-9A-Za-z]{20}|\bgithub_pat_[0-9A-Za-z_]{20}"),
    ("a token of GitLab", r"\bglpat-[0-9A-Za-z_\-]{16}"),
    ("a token of Slack", r"\bxox[abeoprs]-[0-9A-Za-z\-]{10}"),
    ("a token of Hugging Face", r"\bhf_[0-9A-Za-z]{20}"),
    ("a key of an API", r"\b[sr]k[\-_](?=[A-Za-z_\-]{0,60}\d)[0-9A-Za-z_\-]{16}"),
    ("a web token", r"\beyJ[\w\-]{6,4000}\.[\w\-]{6,4000}\.[\w\-]{4}"),
    ("a password in a URL", r"[a-z]://[^/\s:@'\"{}]{0,200}:[^/\s:@'\"{}]{3,200}@"),
    (
        "an authorization",
        r"(?i:authorization['\"]?\s{0,9}[:=,]\s{0,9}[bf]?['\"]?(?:bearer|basic|token)\s{1,9})"
        r"(?![A-Z_]+\b)[^\s'\"<{$]{6}"
        r"|\b(?i:bearer)\s{1,9}(?=[^\s'\"]{0,200}\d)[\w.~+/=\-]{12}",
    ),
    ("an authorization", r"\blogin\s{1,9}\S{1,200}\s{1,9}password\s{1,9}\S"),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
# Words whose neighbours are secrets wherever they occur in a name: `DB_PASSWORD`, `secretKey`.
_WORD = re.compile(
    r"secret|passw(?:or)?d(?<!/etc/passwd)|passphrase|(?:\b|_)pwd|token|api[_\-]?key"
    r"|private[_\-]?key|access[_\-]?key|credential",
    re.IGNORECASE,
)
_BEGINNING = re.compile(r"[\w.\-]*$")
_LONGEST = 80
# After such a word: a sign, perhaps after an annotation, and a text in quotes or without.
_GIVEN = re.compile(
    r"(?P<rest>[\w\-]{0,80})(?:['\"]?\]|['\"])?\s{0,80}"
    r"(?P<sign>:\s{0,9}[A-Za-z][\w.\[\], |]{0,80}=|:=|=>|==?|:|,(?=\s{0,9}['\"]))"
    r"(?P<blank>\s{0,80})"
    r"(?:[bfru]{0,2}(?P<quote>'''|\"\"\"|['\"`])(?P<text>.{0,400}?)(?P=quote)"
    r"|(?P<bare>[^\s'\"`,;]{1,400}))",
    re.IGNORECASE,
)
# The value of a flag, whose name begins with a dash, and of an element.
_OF_FLAG = re.compile(r"[\w\-]{0,80}\s{1,9}['\"]?(?P<bare>[^\s'\"<$\-][^\s'\"]{5,400})")
_OF_ELEMENT = re.compile(r"[\w\-]{0,80}>(?P<text>[^<>]{6,400})</")
_LONG = re.compile(r"['\"][0-9A-Za-z+/=_\-]{20,400}['\"]")
_LEAST = 6
# Entropy in bits per character of random text, and the least length of it without a mark.
_RANDOM_BITS = 3.3
_RUN = 12
_MIXED = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])")
_CASED = re.compile(r"(?=\w*[A-Z])(?=\w*[a-z])")
_OF_YAML = re.compile(r"[+\- ]*[\w\-]*(?i:passw(?:or)?d|passphrase|secret)[\w\-]*:\s*[a-z]+\s*")
# Tokens of texts, and counts of them: `tokenizer`, `max_tokens`, `experts_per_token`.
_OF_WORDS = re.compile(r"(?i)token(?:iz|is|_?(?:dtype|types?)\b)|_per_token\b")
_OF_TEXTS = re.compile(
    r"(?i)_per_token\b|token(?:iz|is|s\b|s_|_?(?:ids?|counts?|dtype|types?|len)\b)"
)
# A flag, a template, a path, a type, or a placeholder.
_HARMLESS = re.compile(
    r"(?ix) -{1,2}[a-z\-]+ | none | null | true | false | undefined | \.\.\. | [\W_]+ | (.)\1+"
    r"| <.*> | .*[{}].* | \$.* | %.* | (?:your|the)[_\- ].* | redacted | omitted"
    r"| (?:b?float|u?int|complex)\d+ | string | number | boolean | optional | required | object"
    r"| unknown | missing | \.{0,2}/[\w./\-]*"
)
_OF_CODE = re.compile(r"[()\[\]|<>\\]")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"[A-Z]+(?:_[A-Z]+)+")


def find_secret(text: str) -> str:
    """Return the kind of secret that a text seems to contain, without it; "" if it has none."""
    for kind, pattern in _COMPILED:
        if pattern.search(text):
            return kind
    was_near = False
    for line in text.splitlines():
        words = list(_WORD.finditer(line))
        if any(_assigns_secret(line, word) for word in words):
            return "a password, token or key"
        if (words or was_near) and any(map(_is_random, _LONG.findall(line))):
            return "a long random text beside the name of a secret"
        was_near = bool(words)
    return ""


def _assigns_secret(line: str, word: re.Match[str]) -> bool:
    """Return whether a line assigns a literal to the name that contains such a word."""
    end = word.end()
    element = _OF_ELEMENT.match(line, end)
    given, flag = _GIVEN.match(line, end), _OF_FLAG.match(line, end)
    if not (given or flag or element):
        return False
    name = _BEGINNING.findall(line[max(0, word.start() - _LONGEST) : word.start()])[0] + word[0]
    if flag and name.startswith("-") and not _OF_TEXTS.search(name):
        return _is_bare_secret(flag["bare"])
    if element and _is_quoted_secret(name, element["text"]):
        return True
    return given is not None and _is_assigned_secret(name + given["rest"], given)


def _is_assigned_secret(name: str, match: re.Match[str]) -> bool:
    text = match["text"]
    if match["sign"] == ",":  # a pair, or words of a list
        if text is None or len(text) < _LEAST or " " in text or _HARMLESS.fullmatch(text):
            return False
        return bool(_MIXED.match(text)) and not _OF_WORDS.search(name)
    if text is not None:
        return _is_quoted_secret(name, text)
    if _OF_TEXTS.search(name):
        return False
    # In a line of a shell or of YAML a bare word is a text; in code it is a name.
    is_shell = name.lstrip("-+").isupper() and not match["blank"]
    is_yaml = match["sign"] == ":" and bool(_OF_YAML.fullmatch(match.string[:200]))
    return _is_bare_secret(match["bare"], is_word=is_shell or is_yaml)


def _is_quoted_secret(name: str, text: str) -> bool:
    if len(text) < _LEAST or _HARMLESS.fullmatch(text) or _OF_WORDS.search(name):
        return False
    if any(c.isdigit() for c in text):
        return True
    # A sentence, the name of a variable, or the name of a secret and not the secret.
    return not (" " in text or _VARIABLE.fullmatch(text) or _WORD.search(text))


def _is_bare_secret(text: str, *, is_word: bool = False) -> bool:
    """Return whether a text without quotes is a secret; unless `is_word` it may be a name."""
    text = text.rstrip(")]}\\.:")
    if len(text) < _LEAST or _HARMLESS.fullmatch(text) or _OF_CODE.search(text):
        return False
    has_digit = any(c.isdigit() for c in text)
    if _IDENTIFIER.fullmatch(text):
        is_own = "token" in text.lower()
        return is_word or (has_digit and "." not in text and not is_own)
    return has_digit or is_word or bool(re.search(r"[!@#$%^&+~]", text))


def _is_random(text: str) -> bool:
    """Return whether a text mixes digits and letters with high entropy."""
    longest: str = max(re.findall(r"[0-9A-Za-z]+", text), key=len, default="")
    is_mixed = bool(_MIXED.match(longest) or _CASED.match(longest))
    if len(longest) < _RUN or not is_mixed or not _MIXED.match(text):
        return False
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts) > _RANDOM_BITS
