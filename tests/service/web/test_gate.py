"""Access control: every route requires its role, and unknown requests are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Mount
from starlette.testclient import TestClient

from service.web.gate import get_needed_role
from service.web.tokens import ROLES
from tests.service.web.apps import ORIGIN, make_app, make_client, make_store


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return make_app(make_store(tmp_path_factory.mktemp("gate")), changes_per_minute=10_000)


def list_routes(app: FastAPI, *, fill: bool = True) -> Iterator[tuple[str, str]]:
    """Method and address of every route and mount, whatever it is; parameters filled in or not."""
    for method, path in _walk(app.routes, ""):
        yield method, re.sub(r"{[^}]*}", "name", path) if fill else path


def _walk(routes: list[BaseRoute], prefix: str) -> Iterator[tuple[str, str]]:
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(
            getattr(route, "original_router", None), "routes", None
        )
        if isinstance(route, Mount):
            yield "GET", f"{prefix}{route.path}/nothing"
        elif inner:
            yield from _walk(inner, prefix)
        else:
            methods = route.methods or {"GET"}
            yield from ((method, prefix + route.path) for method in methods)


def test_every_operation_of_the_api_is_tested(app):
    found = set(list_routes(app))
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            assert (method.upper(), re.sub(r"{[^}]*}", "name", path)) in found
    assert ("GET", "/static/name") in found
    assert ("GET", "/start") in found
    assert not any(isinstance(route, APIRoute) and not route.methods for route in app.routes)


@pytest.mark.parametrize("role", ["", "wrong", *ROLES])
def test_every_route_requires_its_role(app, role):
    client = make_client(app, role if role in ROLES else "")
    if role == "wrong":
        client.headers["authorization"] = "Bearer " + "A" * 43
    for method, path in {*list_routes(app), ("GET", "/nothing"), ("DELETE", "/api/v1/runs")}:
        if path == "/api/v1/events" and role in ROLES:
            continue  # it never ends: tests/service/web/test_events.py
        status = client.request(method, path, headers={"origin": ORIGIN}).status_code
        needed = get_needed_role(method, path)
        if needed is None:
            assert path == "/start" and status == 401, path
        elif role not in ROLES:
            assert status == 401, (method, path)
        elif ROLES.index(role) < ROLES.index(needed):
            assert status == 403, (method, path)
        else:
            assert status not in (401, 403) and status < 500, (method, path, status)


def test_a_refused_browser_gets_a_page_in_the_services_layout(app):
    accept = {"accept": "text/html,*/*"}
    pages = {"/": 200, "/runs/digits/none": 404, "/nothing": 404}
    asked = [(path, "view", status) for path, status in pages.items()]
    for path, role, status in [*asked, ("/", "", 401), ("/start?token=x", "", 401)]:
        answer = make_client(app, role).get(path, headers=accept)
        assert answer.status_code == status
        assert ("<h1>Not signed in</h1>" in answer.text) == (status == 401)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        if not role:
            assert "--add-token NAME --role view" in answer.text
            assert "<script" not in answer.text and '<a href="/">' not in answer.text
            loaded = re.findall(r'(?:href|src)="(/static/[^"]+)"', answer.text)
            assert len(set(loaded)) == 2
            for place in loaded:
                assert make_client(app, "").get(place).status_code == 200
    assert "&lt;b&gt;" in make_client(app).get("/runs/<b>/x", headers=accept).text
    answer = make_client(app, "").get("/api/v1/runs", headers=accept)
    assert answer.headers["content-type"] == "application/problem+json"


def test_without_sign_in_only_the_style_sheet_is_served(app):
    page = make_client(app).get("/").text
    script = re.search(r'src="(/static/app-[^"]+\.js)"', page)[1]
    style = re.search(r'href="(/static/app-[^"]+\.css)"', page)[1]
    client = make_client(app, "")
    assert client.get(style).status_code == 200
    for place in (script, style + "x", "/static/app-000000000000.css/..", "/static/plotly.js"):
        assert client.get(place).status_code in (401, 404)
    assert client.post(style).status_code == 401


def test_a_used_start_address_explains_itself_and_admits_its_own_browser(app):
    client = make_client(app, "")
    address = f"/start?token={app.state.service.tokens.create_start('view')}"
    accept = {"accept": "text/html"}
    cookie = client.get(address, headers=accept).headers["set-cookie"].partition(";")[0]
    answer = client.get(address, headers=accept | {"cookie": cookie})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    client.cookies.clear()
    answer = client.get(address, headers=accept)
    assert answer.status_code == 401 and "was used already" in answer.text
    assert '<form class="body" action="/start">' in answer.text
    # Under a name that is not the service's nobody is asked for a token.
    page = client.get("/", headers=accept | {"host": "attacker.example"})
    assert page.status_code == 421 and "<form" not in page.text


HOSTS = {
    "127.0.0.1": True,
    "127.0.0.1:8080": True,
    "localhost:9000": True,
    "[::1]:8080": True,
    "attacker.example": False,
    "127.0.0.1.attacker.example:8080": False,
    "": False,
    "127.0.0.1:port": False,
}
# Of the host that is called, or of another.
ORIGINS = {
    "http://{host}": True,
    None: True,
    "http://attacker.example": False,
    "null": False,
    "http://{host}.attacker.example": False,
}


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("host", HOSTS)
def test_foreign_hosts_and_origins_are_refused(app, host, origin):
    client = make_client(app)
    headers = {"host": host}
    if origin is not None:
        headers["origin"] = origin.format(host=host)
    status = client.post("/sign-out", headers=headers).status_code
    if not HOSTS[host]:
        assert status == 421
    else:
        assert status == (200 if ORIGINS[origin] else 403)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
def test_another_site_may_link_here_but_load_nothing(app, headers, status):
    assert make_client(app).get("/api/v1/runs", headers=headers).status_code == status
    if headers["sec-fetch-site"] in ("cross-site", "same-site"):
        assert make_client(app).post("/sign-out", headers=headers).status_code == 403


def test_every_response_has_security_headers(app):
    for path, role in (("/api/v1/runs", "view"), ("/api/v1/runs", ""), ("/nothing", "view")):
        answer = make_client(app, role).get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers


def test_a_start_address_signs_in_once_and_drops_its_token(app):
    client = make_client(app, "")
    token = app.state.service.tokens.create_start()
    answer = client.get("/start", params={"token": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and token not in cookie
    assert client.get("/api/v1/whoami").json()["role"] == "admin"
    assert make_client(app, "").get("/start", params={"token": token}).status_code == 401
    # A change by cookie alone is what another page could ask for.
    assert client.post("/sign-out").status_code == 403
    assert client.post("/sign-out", headers={"origin": ORIGIN}).status_code == 200
    assert TestClient(app, base_url=ORIGIN, cookies=client.cookies).get("/").status_code == 401


def test_changes_are_rate_limited_and_logged(tmp_path):
    app = make_app(make_store(tmp_path), changes_per_minute=3)
    client = make_client(app, "submit")
    codes = [client.post("/sign-out").status_code for _ in range(5)]
    assert codes == [200, 200, 200, 429, 429]
    assert make_client(app, "view").get("/api/v1/audit").status_code == 403
    lines = make_client(app, "admin").get("/api/v1/audit").json()["lines"]
    assert [(line["action"], line["status"]) for line in lines][:2] == [("POST /sign-out", 429)] * 2
    assert lines[-1]["who"] == "submit"


BODIES = {
    "a large one": (b'"' + b"a" * (1 << 20) + b'"', "application/json", 413),
    "a large one in pieces": (iter([b"a" * 65536] * 17), "application/json", 413),
    "brackets in brackets": (b"[" * 1_000_000, "application/json", 422),
    "objects in objects": (b'{"a":' * 100_000, "application/json", 422),
    "another kind": (b"a: *b", "application/yaml", 415),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_beyond_the_limits_is_refused(app, name):
    body, kind, status = BODIES[name]
    answer = make_client(app).post("/sign-out", content=body, headers={"content-type": kind})
    assert answer.status_code == status


def test_brackets_in_a_string_do_not_count_as_depth(app):
    body = b'{"a": "' + b"[" * 1000 + b'\\"{{{"}'
    headers = {"content-type": "application/json"}
    assert make_client(app).post("/sign-out", content=body, headers=headers).status_code == 200


def test_headers_beyond_the_limits_are_refused(app):
    client = make_client(app)
    assert client.get("/api/v1/runs", headers={"x-long": "a" * 20_000}).status_code == 431
    many = {f"x-{number}": "a" for number in range(80)}
    assert client.get("/api/v1/runs", headers=many).status_code == 431
    assert client.get("/api/v1/runs?filter=" + "a" * 20_000).status_code == 431


def test_starting_a_check_by_a_page_counts_as_a_change(tmp_path):
    app = make_app(make_store(tmp_path), changes_per_minute=2)
    address = "/submit?config=&estimate"
    assert make_client(app, "view").get(address).status_code == 403
    client = make_client(app, "submit")
    assert [client.get(address).status_code for _ in range(3)] == [200, 200, 429]
    assert client.get("/submit").status_code == 200
    lines = make_client(app, "admin").get("/api/v1/audit").json()["lines"]
    assert [(line["who"], line["action"], line["status"]) for line in lines] == [
        ("submit", "GET /submit", 429),
        ("submit", "GET /submit", 200),
        ("submit", "GET /submit", 200),
        ("view", "GET /submit", 403),
    ]


def test_every_role_may_sign_out_by_the_pages(app):
    book = app.state.service.tokens
    session = book.sign_in(book.add("looker", "view"))
    client = make_client(app, "")
    client.cookies.set(app.state.service.settings.cookie, session)
    assert 'action="/sign-out"' in client.get("/queue").text
    answer = client.post("/sign-out", headers={"origin": ORIGIN, "accept": "text/html"})
    assert answer.status_code == 200 and "<h1>Signed out</h1>" in answer.text
    assert book.identify(session) is None
