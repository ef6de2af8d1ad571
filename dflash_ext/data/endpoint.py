"""One OpenAI-compatible server over plain HTTP: an answer, or the reason why there is none.

The standard library's http.client and nothing above it: no proxy of the environment and no
redirect to another host ever sees a prompt.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import random
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_ext.errors import UserError

# Another attempt may succeed: timeouts, rate limits, a server that starts or is overloaded.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
# No request would succeed: wrong address, key or model.
_FATAL = frozenset({401, 403, 404, 405, 407})
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_RETRY_AFTER = 0.5, 60.0, 900.0
_CONNECT_SECONDS = 30.0
_MAX_BYTES = 64 << 20
REASONING = ("reasoning_content", "reasoning")
# How servers say that the model itself ended its turn.
_ENDED = frozenset({"stop", "tool_calls", "function_call", "eos_token", "stop_sequence"})


@dataclass(frozen=True)
class Answer:
    """What the model said."""

    message: dict[str, Any]
    """role, content, and reasoning_content or tool_calls if there are any."""
    finished: bool
    """Did the model end its turn? Else a limit, a filter or something unknown did."""
    tokens: int
    """Generated tokens; 0 if the server does not tell."""


class Refused(Exception):
    """The server will not answer this request, ever."""


class Unavailable(Exception):
    """The server did not answer in all attempts; it might, later."""


class _Transient(Exception):
    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Endpoint:
    """`url`: the API's base, such as http://localhost:8000/v1. Threads may share one.

    timeout: seconds for one whole response. attempts: requests made before giving up.
    api_key is sent as a bearer token and appears nowhere else. Raises UserError for a bad URL.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 600.0, attempts: int = 8
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"endpoint {url!r}: expected a URL such as http://localhost:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UserError(
                "endpoint: expected a URL without user, password, query or fragment; give a key in "
                "the environment"
            )
        try:
            self._address = (parts.hostname, parts.port)
        except ValueError as error:
            raise UserError(f"endpoint {url!r}: {error}") from None
        self._path = parts.path.rstrip("/").removesuffix("/chat/completions")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        if any(ord(c) < 33 or ord(c) > 126 for c in api_key or ""):
            raise UserError("the API key holds characters that no header can carry")
        self._key, self._timeout, self._attempts = api_key, timeout, attempts
        self._stop = threading.Event()
        self._local = threading.local()

    def models(self) -> list[str]:
        """Ids of the models it serves. UserError if it cannot be reached or does not tell."""
        try:
            listed = self._retried("GET", "/models", None)
            return [str(model["id"]) for model in listed["data"]]
        except (Unavailable, Refused) as error:
            raise UserError(f"endpoint {self.url}: {error}") from None
        except (KeyError, TypeError):
            raise UserError(f"endpoint {self.url} does not list its models; name one") from None

    def chat(self, body: dict[str, Any]) -> Answer:
        """POST /chat/completions. Raises Refused, Unavailable, or UserError if none can succeed."""
        return _answer(self._retried("POST", "/chat/completions", body, check=_answer))

    def stop(self) -> None:
        """No attempt begins any more, pauses end: calls in progress raise Unavailable."""
        self._stop.set()

    def _retried(self, method: str, path: str, body: Any, check: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        problem = "it was stopped"
        for attempt in range(self._attempts):
            if self._stop.is_set():
                break
            try:
                found = self._once(method, path, data)
                if check is not None:
                    check(found)
                return found
            except _Transient as error:
                problem = self._hide(str(error))
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
                # Jitter: a hundred threads that failed together must not come back together.
                pause = max(error.retry_after, pause * random.uniform(0.5, 1.0))
            if attempt + 1 < self._attempts:
                self._stop.wait(pause)
        raise Unavailable(f"no answer in {self._attempts} attempts, at last: {problem}")

    def _once(self, method: str, path: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        deadline = time.monotonic() + self._timeout
        kept = getattr(self._local, "connection", None) is not None
        try:
            connection = self._connection()
            connection.request(method, self._path + path, body=data, headers=headers)
            response = connection.getresponse()
            content = _read(response, deadline)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._drop()
            if kept:  # servers close connections that were idle: no trouble, begin anew
                return self._once(method, path, data)
            raise _Transient("the server closed the connection") from None
        except TimeoutError:
            self._drop()
            raise _Transient(f"no response within {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise _Transient(str(error) or type(error).__name__) from None
        except _Transient:
            self._drop()
            raise
        if response.will_close:
            self._drop()
        return self._parsed(response, content)

    def _parsed(self, response: http.client.HTTPResponse, content: bytes) -> Any:
        status = response.status
        if status == 200:
            try:
                return json.loads(content)
            except (ValueError, RecursionError):
                raise _Transient(f"a response of {len(content)} bytes that is no JSON") from None
        said = self._hide(_message(content))
        if status in _TRANSIENT or status >= 500:
            wait = _retry_after(response.getheader("Retry-After"))
            raise _Transient(f"HTTP {status} {said}".rstrip(), wait)
        if status in _FATAL or 300 <= status < 400:
            where = response.getheader("Location")
            raise UserError(
                f"endpoint {self.url} says HTTP {status} {said}".rstrip()
                + (f" (moved to {where}; redirects are not followed)" if where else "")
                + "; check the URL, the model's name and the API key"
            )
        raise Refused(f"HTTP {status} {said}".rstrip())

    def _connection(self) -> http.client.HTTPConnection:
        """This thread's, opened if there is none. Raises OSError."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            return connection
        host, port = self._address
        wait = min(self._timeout, _CONNECT_SECONDS)
        if self._tls:
            connection = http.client.HTTPSConnection(host, port, timeout=wait, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=wait)
        connection.connect()
        connection.sock.settimeout(self._timeout)  # an answer may take longer than a connection
        self._local.connection = connection
        return connection

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body. The socket's timeout is per read: a server that drips is stopped here."""
    pieces, size = [], 0
    while piece := response.read1(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > _MAX_BYTES:
            raise _Transient(f"a response of more than {_MAX_BYTES} bytes")
    if response.length:  # what Content-Length promised and did not come
        raise _Transient(f"a response cut after {size} bytes")
    response.close()  # by its own count it is not done yet, and the connection not free
    return b"".join(pieces)


def _message(content: bytes) -> str:
    """The server's own words about an error, shortened to one line."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        pass
    return " ".join(text.split())[:200]


def _retry_after(header: str | None) -> float:
    """Seconds to wait, from a number of seconds or a date; 0 if there is none that makes sense."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER) if seconds == seconds else 0.0


def _answer(response: Any) -> Answer:
    """The first choice. Raises _Transient if it is none, Refused if the model said nothing."""
    try:
        choice = response["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason") or "stop"
        content, calls = message.get("content"), message.get("tool_calls") or None
        thoughts = next((message[k] for k in REASONING if message.get(k)), None)
        usage = response.get("usage") or {}
        tokens = int(usage.get("completion_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise _Transient("a response that is no chat completion") from None
    if not isinstance(content, str | None) or not isinstance(thoughts, str | None):
        raise _Transient("a chat completion whose content is no text")
    if not isinstance(calls, list | None) or not isinstance(finish, str):
        raise _Transient("a chat completion with tool_calls that are no list")
    if not (content and content.strip()) and not calls:
        raise Refused(f"the answer is empty (finish_reason {finish})")
    out: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if thoughts:
        out["reasoning_content"] = thoughts
    if calls:
        out["tool_calls"] = calls
    return Answer(out, finish in _ENDED, tokens)
