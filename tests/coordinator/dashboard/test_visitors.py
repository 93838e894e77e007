"""Sessions of browsers: a code is used once, a cookie reads, orders need the key, other origins are refused."""

from __future__ import annotations

import pytest

from unicron_lightning.coordinator.access import (
    CODE_SECONDS,
    LOGIN,
    MOST_CODES,
    MOST_SESSIONS,
    PAGES,
    SESSION_SECONDS,
    BrowserSession,
    Visitors,
    foreign,
    is_open,
)

ORDERS = (
    "/v1/nodes/n1/drain",
    "/v1/nodes/n%2F1/undrain",
    "/v1/tasks/t/resize",
    "/v1/tasks/t/cancel",
    "/v1/tasks/t/inject",
)
NO_ORDERS = (
    "/v1/jobs",
    "/v1/tasks/t/relayout",
    "/v1/dashboard/code",
    "/v1/tasks/a/b/cancel",
    "/v1/nodes//drain",
    "/metrics",
)


def entered(visitors: Visitors, now: float = 0.0) -> BrowserSession:
    session = visitors.log_in(visitors.issue_code(now), now)
    assert session is not None
    return session


def test_a_code_opens_one_session_in_time():
    visitors = Visitors("c")
    code = visitors.issue_code(0.0)
    session = visitors.log_in(code, 1.0)
    assert session is not None and visitors.of({"c": session.id}, 2.0) == session
    assert visitors.log_in(code, 1.0) is None
    late = visitors.issue_code(0.0)
    assert visitors.log_in(late, CODE_SECONDS) is None
    assert visitors.log_in("", 0.0) is None and visitors.log_in("ä", 0.0) is None


def test_a_session_ends():
    visitors = Visitors("c")
    session = entered(visitors)
    assert visitors.of({"c": session.id}, SESSION_SECONDS) is None
    other = entered(visitors)
    visitors.log_out(other)
    assert visitors.of({"c": other.id}, 1.0) is None
    assert visitors.of({"c": "x"}, 1.0) is None and visitors.of({}, 1.0) is None


def test_codes_and_sessions_are_bounded():
    visitors = Visitors("c")
    first = visitors.issue_code(0.0)
    for _ in range(MOST_CODES):
        visitors.issue_code(0.0)
    assert visitors.log_in(first, 1.0) is None
    sessions = [entered(visitors) for _ in range(MOST_SESSIONS + 1)]
    assert visitors.of({"c": sessions[0].id}, 1.0) is None
    assert visitors.of({"c": sessions[-1].id}, 1.0) == sessions[-1]


@pytest.mark.parametrize("path", ORDERS)
def test_orders_need_the_key(path):
    visitors = Visitors("c")
    session = entered(visitors)
    assert visitors.may(session, "POST", path, session.key)
    assert not visitors.may(session, "POST", path, "")
    assert not visitors.may(session, "POST", path, session.id)
    assert not visitors.may(session, "GET", path, session.key)
    assert not visitors.may(None, "POST", path, session.key)


@pytest.mark.parametrize("path", NO_ORDERS)
def test_a_page_may_do_nothing_else(path):
    visitors = Visitors("c")
    session = entered(visitors)
    assert not visitors.may(session, "POST", path, session.key)
    assert not visitors.may(session, "GET", path, session.key)


def test_only_files_and_the_log_in_are_open():
    assert all(is_open("GET", path) for path in PAGES)
    assert is_open("POST", LOGIN) and not is_open("GET", LOGIN) and not is_open("POST", "/dashboard")
    assert not any(is_open("GET", path) for path in ("/v1/status", "/dashboard/stream", "/dashboard/../v1/status"))


def test_origins():
    here = {"scheme": "http", "host": "127.0.0.1:1"}
    assert not foreign(None, None, **here) and not foreign("http://127.0.0.1:1", "same-origin", **here)
    assert not foreign(None, "none", **here)
    for origin, site in (
        ("http://127.0.0.1:2", None),
        ("https://127.0.0.1:1", None),
        ("null", None),
        ("http://evil", "cross-site"),
        (None, "cross-site"),
        (None, "same-site"),
    ):
        assert foreign(origin, site, **here)
