"""Documents with tables are checked before the tables are computed."""

from __future__ import annotations

import os

import pytest

from lab.marked_tables import check_document, get_marks, write_between
from utils.errors import UserError

BEGIN, END = get_marks("one")


def test_a_document_with_all_markers_passes_the_check(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    check_document(path, "one")
    check_document(None, "one")
    assert path.read_text() == f"{BEGIN}\n{END}\n"
    with pytest.raises(UserError, match="lacks the lines <!-- two: begin"):
        check_document(path, "one", "two")


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff", f"{END}\n{BEGIN}".encode(), BEGIN.encode()]
)
def test_a_document_without_a_tables_markers_is_refused(tmp_path, content):
    path = tmp_path / "page.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"--docs \('.*page.md'\)"):
        check_document(path, "one")
    if content is not None:
        with pytest.raises(UserError, match=r"--docs \('.*page.md'\)"):
            write_between(path, "one", "table")
        assert path.read_bytes() == content
    with pytest.raises(UserError, match="Is a directory"):
        check_document(tmp_path, "one")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_document_is_refused(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    path.chmod(0o400)
    with pytest.raises(UserError, match="Permission denied"):
        check_document(path, "one")
