"""Vectors from an endpoint that speaks OpenAI's embeddings: of any model that somebody serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import httpx2
import numpy as np

from ...errors import UpstreamError, UpstreamTimeoutError
from .base import FloatMatrix, normalized

_TIMEOUT_S: Final = 5.0
_MAX_BATCH: Final = 256


class RemoteEmbedder:
    """:class:`~.base.Embedder` over HTTP.

    Args:
        url: up to and with ``/v1``.
        model: the model's name there.
        key: sent as a bearer token, where given.
        timeout_s: how long to wait for an answer.
    """

    def __init__(
        self, url: str, model: str, *, key: str | None = None, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._url, self._model = url.rstrip("/"), model
        self.identity = f"openai {self._url} {model}"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(timeout=timeout_s, headers=headers, trust_env=False)

    def embed(self, texts: Sequence[str]) -> FloatMatrix:
        parts = [self._batch(texts[at : at + _MAX_BATCH]) for at in range(0, len(texts), _MAX_BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    def _batch(self, texts: Sequence[str]) -> FloatMatrix:
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        try:
            response = self._client.post(f"{self._url}/embeddings", json=body)
        except httpx2.TimeoutException as error:
            raise UpstreamTimeoutError(f"The embedder at {self._url} does not answer.") from error
        except httpx2.HTTPError as error:
            raise UpstreamError(f"The embedder at {self._url} cannot be reached.") from error
        if response.status_code != 200:
            raise UpstreamError(f"The embedder at {self._url} answered with status {response.status_code}.")
        try:
            rows: list[Any] = sorted(response.json()["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], np.float32)
        except (ValueError, KeyError, TypeError) as error:
            raise UpstreamError(f"The embedder at {self._url} sent no embeddings.") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise UpstreamError(f"The embedder at {self._url} sent other vectors than were asked for.")
        return normalized(vectors)

    def close(self) -> None:
        """Lets its connections go."""
        self._client.close()
