from __future__ import annotations

import email.utils
import socket
import threading
import time

import pytest
from busy_machine import PATIENCE_SECONDS
from fake_endpoint import FakeEndpoint, completion, echo

from dflash_ext.data import endpoint as module
from dflash_ext.data.endpoint import Endpoint, Refused, Unavailable
from dflash_ext.errors import UserError

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GOOD = echo(BODY)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)


def first(*replies):
    """These replies to the first requests, good ones afterwards."""
    return lambda number, body: replies[number] if number < len(replies) else echo(body)


TROUBLE = {
    "500": (500, {}, b"oops"),
    "502": (502, {}, b""),
    "503": (503, {}, b'{"error": {"message": "loading"}}'),
    "429": (429, {"Retry-After": "0.05"}, b"{}"),
    "408": (408, {}, b""),
    "529": (529, {}, b""),
    "truncated JSON": (200, {}, GOOD[2][:-7]),
    "cut body": (200, {"Content-Length": str(len(GOOD[2]) + 50)}, GOOD[2]),
    "no response": None,
    "no JSON": (200, {}, b"<html>"),
    "not UTF-8": (200, {}, b"\xff\xfe{}"),
    "deep JSON": (200, {}, b"[" * 100_000),
    "no choices": (200, {}, b'{"object": "chat.completion"}'),
    "empty choices": (200, {}, b'{"choices": []}'),
    "a list": (200, {}, b"[1, 2]"),
    "null": (200, {}, b"null"),
    "content is a number": completion(7),
    "content is a list": completion(["a"]),
    "tool_calls is a number": completion("a", tool_calls=3),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_that_passes_is_retried(name):
    with FakeEndpoint(first(TROUBLE[name], TROUBLE[name])) as server:
        answer = Endpoint(server.url, attempts=4).chat(BODY)
        assert answer.message == {"role": "assistant", "content": "[u:hi]"}
        assert len(server.requests) == 3
        assert all(body == BODY for body in server.requests)


def test_trouble_that_stays_is_told():
    with FakeEndpoint(lambda *_: TROUBLE["503"]) as server:
        with pytest.raises(Unavailable, match="no answer in 3 attempts, at last: HTTP 503 loading"):
            Endpoint(server.url, attempts=3).chat(BODY)
        assert len(server.requests) == 3


def test_a_server_that_hangs_is_left_and_asked_again(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.05)
    over = threading.Event()

    def hang(number, body):
        if number == 0:
            over.wait(PATIENCE_SECONDS)
        return echo(body)

    with FakeEndpoint(hang) as server:
        # Attempts for a machine on which even a good answer may now and then take longer.
        answer = Endpoint(server.url, timeout=0.3, attempts=100).chat(BODY)
        assert answer.message["content"] == "[u:hi]"
        assert len(server.requests) > 1
        over.set()


def test_a_server_that_drips_is_left():
    """Every single read is in time, the response is not."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while True:
                try:
                    connection.sendall(b" ")
                except OSError:
                    return
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, pytest.raises(Unavailable, match=r"no response within 0\.3 s"):
        Endpoint(url, timeout=0.3, attempts=1).chat(BODY)


def test_pauses_double_and_retry_after_is_obeyed(monkeypatch):
    replies = [TROUBLE["500"]] * 4 + [(429, {"Retry-After": "7"}, b""), TROUBLE["500"]]
    pauses = []
    with FakeEndpoint(first(*replies)) as server:
        endpoint = Endpoint(server.url, attempts=8)
        monkeypatch.setattr(module, "_FIRST_PAUSE", 1.0)
        monkeypatch.setattr(module, "_LONGEST_PAUSE", 12.0)
        monkeypatch.setattr(endpoint._stop, "wait", pauses.append)
        endpoint.chat(BODY)
    for pause, longest in zip(pauses[:4], (1, 2, 4, 8)):
        assert longest / 2 <= pause <= longest
    assert pauses[4] >= 7
    assert 6 <= pauses[5] <= 12  # not 32
    assert len(pauses) == 6


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        (None, 0, 0),
        ("3", 3, 3),
        ("0.5", 0.5, 0.5),
        ("-5", 0, 0),
        ("nan", 0, 0),
        ("soon", 0, 0),
        ("1e9", 900, 900),
    ],
)
def test_retry_after_is_a_number_of_seconds(header, low, high):
    assert low <= module._retry_after(header) <= high


def test_retry_after_as_a_date():
    for seconds, low, high in ((800, 400, 801), (-100, 0, 0)):
        header = email.utils.formatdate(time.time() + seconds, usegmt=True)
        assert low <= module._retry_after(header) <= high


@pytest.mark.parametrize("status", [400, 409 + 4, 422])
def test_a_request_it_refuses_is_not_repeated(status):
    reply = (status, {}, b'{"error": {"message": "context length\\nexceeded"}}')
    with FakeEndpoint(lambda *_: reply) as server:
        with pytest.raises(Refused, match=f"HTTP {status} context length exceeded"):
            Endpoint(server.url).chat(BODY)
        assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [completion(""), completion("  \n"), completion(None)])
def test_an_empty_answer_is_none(reply):
    with FakeEndpoint(lambda *_: reply) as server, pytest.raises(Refused, match="is empty"):
        Endpoint(server.url).chat(BODY)


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_what_no_request_can_succeed_with_is_an_error(status):
    other = FakeEndpoint()
    headers = {"Location": f"{other.url}/elsewhere"} if status == 302 else {}
    with FakeEndpoint(lambda *_: (status, headers, b"key sk-123 is no good")) as server, other:
        with pytest.raises(UserError, match=f"says HTTP {status}") as caught:
            Endpoint(server.url, api_key="sk-123").chat(BODY)
        assert "sk-123" not in str(caught.value)
        assert other.requests == []  # a redirect is not followed: prompts go where they were sent


def test_the_key_is_in_the_header_alone():
    with FakeEndpoint() as server:
        Endpoint(server.url, api_key="sk-123").chat(BODY)
        Endpoint(server.url).chat(BODY)
        assert server.headers[0]["Authorization"] == "Bearer sk-123"
        assert "Authorization" not in server.headers[1]
        assert "sk-123" not in str(server.requests)
    with FakeEndpoint(lambda *_: (500, {}, b"bad key sk-123")) as server:
        with pytest.raises(Unavailable) as caught:
            Endpoint(server.url, api_key="sk-123", attempts=1).chat(BODY)
        assert "sk-123" not in str(caught.value)
        assert "[key]" in str(caught.value)


def test_a_proxy_of_the_environment_sees_nothing(monkeypatch):
    with FakeEndpoint() as proxy, FakeEndpoint() as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        Endpoint(server.url).chat(BODY)
        assert (len(server.requests), proxy.requests) == (1, [])


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://localhost/v1",
        "http://",
        "http://user:secret@localhost/v1",
        "http://localhost/v1?key=secret",
        "http://localhost:port/v1",
        "",
    ],
)
def test_bad_urls(url):
    with pytest.raises(UserError, match="endpoint") as caught:
        Endpoint(url)
    assert "user:secret" not in str(caught.value)


def test_models_and_full_paths():
    with FakeEndpoint() as server:
        server.models = ["a", "b"]
        assert Endpoint(server.url).models() == ["a", "b"]
        assert Endpoint(f"{server.url}/chat/completions").url == server.url
    with pytest.raises(UserError, match="no answer in 2 attempts"):
        Endpoint(server.url, attempts=2).models()


def test_reasoning_and_tool_calls_are_kept():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    reply = completion(None, finish="tool_calls", tool_calls=calls, reasoning_content="hm")
    with FakeEndpoint(lambda *_: reply) as server:
        answer = Endpoint(server.url).chat(BODY)
    assert answer.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": calls,
    }
    assert (answer.finished, answer.tokens) == (True, 3)


@pytest.mark.parametrize(
    ("reason", "finished"),
    [("stop", True), (None, True), ("length", False), ("content_filter", False), ("abort", False)],
)
def test_only_the_model_itself_ends_its_turn(reason, finished):
    with FakeEndpoint(lambda *_: completion("a", finish=reason)) as server:
        assert Endpoint(server.url).chat(BODY).finished == finished


def test_connections_are_kept_and_a_closed_one_is_no_trouble():
    with FakeEndpoint() as server:
        endpoint = Endpoint(server.url, attempts=1)
        for _ in range(5):
            endpoint.chat(BODY)
        assert (len(server.requests), server.connections) == (5, 1)
        endpoint._local.connection.sock.shutdown(socket.SHUT_RDWR)  # as if idle for too long
        endpoint.chat(BODY)
        assert (len(server.requests), server.connections) == (6, 2)


def test_stop_ends_the_pauses():
    with FakeEndpoint(lambda *_: (429, {"Retry-After": "900"}, b"")) as server:
        endpoint = Endpoint(server.url)
        threading.Timer(0.1, endpoint.stop).start()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            endpoint.chat(BODY)
        assert time.monotonic() - began < PATIENCE_SECONDS
