"""Keeps the lines that libjpeg itself writes to stderr away from the one that names the file."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

_STDERR = 2
_LINES = re.compile(
    rb"^(Improper call to JPEG library in state \d+|Premature end of JPEG file|"
    rb"Input file read error|Corrupt JPEG data: .*|Not a JPEG file: .*|.* jpeg_mem\.cc:\d+\] .*|"
    rb"WARNING: All log messages before absl::InitializeLog\(\) .*)\n",
    flags=re.MULTILINE,
)
# The redirection is the whole process's; one that stands within another waits for nobody.
_REDIRECTING = threading.RLock()


@contextlib.contextmanager
def drop_decoder_messages() -> Iterator[None]:
    """Drop libjpeg's lines from stderr meanwhile; whatever else was written comes at the end.

    TensorFlow has no setting for them: the C library writes to the file descriptor itself.
    """
    with _REDIRECTING, tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(_STDERR)
        os.dup2(file.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STDERR)
            os.close(kept)
            file.seek(0)
            os.write(_STDERR, _LINES.sub(b"", file.read()))
