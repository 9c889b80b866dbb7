"""Warming a server over HTTP: prefixes are asked for as token ids, one token of answer each."""

from __future__ import annotations

import threading
from math import inf
from typing import Any, Final, Self

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from ostinato.errors import WarmingError
from ostinato.series import PREFIX

from .plan import Prefix
from .report import Room
from .run import Had

_POLL_S: Final = 0.2
_TIMEOUT_S: Final = 600.0


class HttpTarget:
    """A server with OpenAI's API that takes token ids as prompts, ours and vLLM among them.

    Its ``/metrics`` say how busy it is and what room it has. Where they do not (another server), there is
    always room, and it counts as idle: then only the number of prefixes bounds the work.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        block_size: int,
        share: float,
        piece_tokens: int,
        max_tokens: int,
        api_key: str | None = None,
    ) -> None:
        """Raises ``WarmingError`` where nobody answers."""
        self.piece_tokens = piece_tokens
        self.max_tokens = max_tokens
        self.stop = threading.Event()
        self._model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx2.Client(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=_TIMEOUT_S
        )
        found = self._load()
        self.num_blocks = int(found["blocks"]) if found["blocks"] < inf else None
        self._room = Room(found["blocks"] * share, block_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def wait_for_idle(self) -> bool:
        while not self.stop.is_set():
            if self._load()["requests"] == 0:
                return True
            self.stop.wait(_POLL_S)
        return False

    def num_cached(self, prefix: Prefix) -> int:
        """What earlier prefixes brought; what else is there is found when it is asked for."""
        return len(prefix.tokens) - prefix.new_tokens

    def room_until(self, start: int) -> int:
        return self._room.until(start, self._load()["free"])

    def have(self, prefix: Prefix, num_tokens: int) -> Had:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prefix.tokens[:num_tokens].tolist(),
            "max_tokens": 1,
            "temperature": 0,
        }
        if self.num_blocks is not None:  # ours: what is kept has to be exact, whatever its requests are
            body["reuse"] = "exact"
        if prefix.cache_salt:
            body["cache_salt"] = prefix.cache_salt
        usage = self._ask("POST", "/v1/completions", body).json().get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._room.take(cached, num_tokens)
        return Had(cached, 0, num_tokens - cached)

    def _load(self) -> dict[str, float]:
        """Requests under way, and blocks: all of them, and those that are free."""
        try:
            reply = self._client.get("/metrics")
        except httpx2.HTTPError as error:
            raise WarmingError(f"cannot reach {self._client.base_url}: {error}") from error
        values: dict[str, float] = {}
        if reply.status_code == httpx2.codes.OK:
            for family in text_string_to_metric_families(reply.text):
                for sample in family.samples:
                    state = sample.labels.get("state", "")
                    name = sample.name.partition(":")[2] or sample.name.removeprefix(PREFIX)
                    values[f"{name} {state}".strip()] = sample.value
        blocks = [values.get(f"kv_blocks {state}", inf) for state in ("held", "evictable", "free")]
        requests = values.get("num_requests_running", 0.0) + values.get("num_requests_waiting", 0.0)
        return {"requests": requests, "blocks": sum(blocks), "free": blocks[2]}

    def _ask(self, method: str, path: str, body: dict[str, Any]) -> httpx2.Response:
        try:
            reply = self._client.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise WarmingError(f"cannot reach {self._client.base_url}: {error}") from error
        if reply.status_code != httpx2.codes.OK:
            raise WarmingError(f"{self._client.base_url} answered {reply.status_code}: {reply.text[:300]}")
        return reply


def served_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """Name and longest sequence (where it says so) of the model that a server has.

    Raises:
        WarmingError: nobody answers, or something that is no such server.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        reply = httpx2.get(f"{base}/v1/models", headers=headers, timeout=30.0)
        reply.raise_for_status()
        card = reply.json()["data"][0]
        length = card.get("max_model_len")
        return str(card["id"]), length if isinstance(length, int) else None
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise WarmingError(f"{base} does not say what model it has: {error}") from error
