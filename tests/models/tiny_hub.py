"""A model hub on localhost: as much of the real one's HTTP as the hub library uses for models."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """Files of one model, or how it is refused: ``status`` and the hub's own error code.

    ``breaks``: how many times the connection is cut in the middle of a file.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    status: int = 200
    error_code: str | None = None
    token: str | None = None
    delay_s: float = 0.0
    breaks: dict[str, int] = field(default_factory=dict)


@dataclass
class TinyHub:
    endpoint: str
    repositories: dict[str, Repository]
    requests: list[str] = field(default_factory=list)

    def downloaded(self) -> set[str]:
        """Names of the files whose content was sent."""
        return {r.rsplit("/", 1)[1] for r in self.requests if r.startswith("GET") and "/resolve/" in r}


@contextmanager
def serve_hub(repositories: dict[str, Repository]) -> Iterator[TinyHub]:
    """Run the hub for the block; ``repositories`` may be changed while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = TinyHub(f"http://127.0.0.1:{server.server_port}", repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        return None

    def _answer(self, *, with_body: bool) -> None:
        hub: TinyHub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path).strip("/")
        hub.requests.append(f"{self.command} {path}")
        parts = path.split("/")
        repo_id = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        repository = hub.repositories.get(repo_id)
        if repository is None:
            return self._refuse(404, "RepoNotFound", with_body)
        time.sleep(repository.delay_s)
        if repository.status != 200:
            return self._refuse(repository.status, repository.error_code, with_body)
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._refuse(401, "RepoNotFound", with_body)
        if parts[0] == "api":
            return self._api(repo_id, repository, parts[4:], with_body)
        return self._file(repository, parts, with_body)

    def _api(self, repo_id: str, repository: Repository, rest: list[str], with_body: bool) -> None:
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound", with_body)
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": _oid(d)}
                for n, d in repository.files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), {}, with_body)
        siblings = [{"rfilename": n, "size": len(d), "blobId": _oid(d)} for n, d in repository.files.items()]
        info = {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings, "tags": []}
        return self._send(200, json.dumps(info).encode(), {}, with_body)

    def _file(self, repository: Repository, parts: list[str], with_body: bool) -> None:
        revision, name = parts[3], "/".join(parts[4:])
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound", with_body)
        if name not in repository.files:
            return self._refuse(404, "EntryNotFound", with_body)
        data = repository.files[name]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if with_body and repository.breaks.get(name):
            repository.breaks[name] -= 1
            self.close_connection = True
            return self._send(206 if start else 200, data[start:], headers, (len(data) - start) // 2)
        return self._send(206 if start else 200, data[start:], headers, with_body)

    def _refuse(self, status: int, code: str | None, with_body: bool) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, b'{"error":"refused"}', headers, with_body)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], num_body_bytes: int | bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if num_body_bytes is not False:
            self.wfile.write(data if num_body_bytes is True else data[:num_body_bytes])


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
