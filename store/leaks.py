"""Finds what looks like a secret in texts that are about to be kept."""

from __future__ import annotations

import re

_PATTERNS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a cloud access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google API key": r"\bAIza[0-9A-Za-z_\-]{35}",
    "a Google access token": r"\bya29\.[0-9A-Za-z_\-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[0-9A-Za-z]{36}|github_pat_[0-9A-Za-z_]{22,})",
    "a Slack token": r"\bxox[abprs]-[0-9A-Za-z\-]{10,}",
    "a Hugging Face token": r"\bhf_[0-9A-Za-z]{30,}",
    "an API key": r"\bsk-[0-9A-Za-z_\-]{20,}",
    "a password in a URL": r"[a-z][a-z0-9+.\-]*://[^/\s:@'\"{}]+:[^/\s:@'\"{}]{3,}@",
    # A name alone says nothing; a long text with digits behind it does.
    "a password or token": (
        r"(?i)(?:password|passwd|secret|token|api_?key|credential)s?['\"]?\s*[:=]\s*['\"]?"
        r"(?=[0-9A-Za-z+/_\-.]*\d)(?=[0-9A-Za-z+/_\-.]*[A-Za-z])[0-9A-Za-z+/_\-]{20,}"
    ),
}
_COMPILED = {kind: re.compile(pattern) for kind, pattern in _PATTERNS.items()}


def find_secret(text: str) -> str:
    """What kind of secret a text seems to hold, in words and without it; empty: none."""
    return next((kind for kind, one in _COMPILED.items() if one.search(text)), "")
