"""Tokens: shown once, stored as hashes, in a file that only its owner reads."""

from __future__ import annotations

import json
import threading

import pytest

from service.web import tokens as module
from service.web.tokens import TokenBook
from utils.errors import UserError


def test_a_token_is_shown_once_and_only_its_hash_is_stored(tmp_path):
    path = tmp_path / "service" / "tokens.json"
    token = TokenBook(path).add("monitor", "view")
    assert len(token) >= 43
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    found = TokenBook(path).identify(token)
    assert found is not None and (found.who, found.role) == ("monitor", "view")
    assert TokenBook(path).identify(token[:-1]) is None
    assert not found.may("submit") and found.may("view")


def test_a_start_token_signs_in_once_to_this_process_only(tmp_path):
    book = TokenBook(tmp_path / "tokens.json")
    start = book.create_start()
    assert TokenBook(book.path).sign_in(start) is None
    session = book.sign_in(start)
    assert session and book.sign_in(start) is None
    assert book.identify(start) is None
    assert TokenBook(book.path).identify(session).role == "admin"
    assert book.sign_in(session) is None
    book.sign_out(session)
    assert book.identify(session) is None


def test_a_token_removed_by_another_program_is_revoked_at_once(tmp_path):
    book = TokenBook(tmp_path / "tokens.json")
    token = book.add("a", "submit")
    other = TokenBook(book.path)
    assert other.identify(token)
    rows = json.loads(book.path.read_text())
    book.path.write_text(json.dumps({"tokens": []}))
    assert other.identify(token) is None
    book.path.write_text(json.dumps(rows))
    assert other.identify(token)


def test_a_cookie_expires_after_thirty_days(tmp_path, monkeypatch):
    book = TokenBook(tmp_path / "tokens.json")
    session = book.sign_in(book.create_start())
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + module.COOKIE_S + 2)
    assert book.identify(session) is None


def test_tokens_created_concurrently_are_all_kept(tmp_path):
    """Threads of the service, and programs beside it."""
    path, made = tmp_path / "tokens.json", []

    def make(number: int) -> None:
        book = TokenBook(path)
        made.extend(book.add(f"t{number}", "view") for _ in range(5))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book = TokenBook(path)
    assert len(made) == 40 and all(book.identify(token) for token in made)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("{}", 0o600, "no token file"),
        ("[", 0o600, "no token file"),
        ('{"tokens": [{"who": 1}]}', 0o600, "no token file"),
        ('{"tokens": []}', 0o644, "chmod 600"),
    ],
)
def test_a_damaged_or_readable_token_file_is_refused(tmp_path, text, mode, words):
    path = tmp_path / "tokens.json"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UserError, match=words):
        TokenBook(path)


@pytest.mark.parametrize(("who", "role"), [("", "view"), ("a b", "view"), ("a", "root")])
def test_an_invalid_name_or_role_is_refused(tmp_path, who, role):
    with pytest.raises(UserError):
        TokenBook(tmp_path / "tokens.json").add(who, role)


def test_a_cookie_is_revoked_with_its_named_token(tmp_path):
    book = TokenBook(tmp_path / "tokens.json")
    kept = book.sign_in(book.create_start())
    cookies = [book.sign_in(book.add(name, "submit")) for name in ("leaves", "stays")]
    rows = json.loads(book.path.read_text())["tokens"]
    gone = next(row for row in rows if row["who"] == "leaves" and row["kind"] == "named")
    rows.remove(gone)
    book.path.write_text(json.dumps({"tokens": rows}))
    assert book.identify(cookies[0]) is None
    assert book.identify(cookies[1]) and book.identify(kept)
    book.add("next", "view")
    assert "leaves" not in book.path.read_text()


def test_a_cookie_without_a_known_token_is_refused(tmp_path):
    book = TokenBook(tmp_path / "tokens.json")
    session = book.sign_in(book.create_start())
    rows = json.loads(book.path.read_text())["tokens"]
    book.path.write_text(json.dumps({"tokens": [{**rows[0], "parent": "0" * 64}]}))
    assert book.identify(session) is None
    book.path.write_text(
        json.dumps({"tokens": [{k: v for k, v in rows[0].items() if k != "parent"}]})
    )
    assert book.identify(session) is None
