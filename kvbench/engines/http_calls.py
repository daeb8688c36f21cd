"""Control calls to a server: short, synchronous, never timed. The load generator has its own client."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvbench.core.errors import KvbenchError, UsageError

_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Status and body of an answer; status 0 with the reason as text where there was none."""

    status: int
    text: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON, or None where it is not."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


def call(
    url: str, path: str, *, method: str = "GET", body: object = None, key: str | None = None, timeout_s: float = 30.0
) -> Reply:
    """One request to `url` + `path`; a server that does not answer is a Reply of status 0, not an exception.

    `key` goes along as bearer token, for control calls that a server guards.
    """
    host, port, base, secure = split_url(url)
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout_s)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, base + path, body=data, headers=headers)
        answer = connection.getresponse()
        text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
        return Reply(status=answer.status, text=text)
    except (OSError, http.client.HTTPException) as error:
        return Reply(status=0, text=str(error) or type(error).__name__)
    finally:
        connection.close()


def split_url(url: str) -> tuple[str, int, str, bool]:
    """Host, port, base path and whether TLS is used, of a server's address."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise UsageError(f"address {url!r} has no valid port ({error}); write it like http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"address {url!r} is not a server's; write it like http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    return parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/").removesuffix("/v1"), secure


def required_json(url: str, path: str, *, what: str, timeout_s: float = 30.0) -> Any:
    """The JSON of an answer that must exist; else one sentence saying which call failed and how."""
    reply = call(url, path, timeout_s=timeout_s)
    body = reply.json() if reply.ok else None
    if body is None:
        said = reply.text.strip()[:120] or "nothing"
        raise KvbenchError(
            f"{url}{path} did not tell {what} (status {reply.status or 'none'}: {said}); "
            "is an OpenAI-compatible server running there?"
        )
    return body
