"""transformers as a server, as well as its own public means allow; runs in transformers' own environment.

- ``--mode kept``: `generate`, one request after another, with the caches of earlier requests kept. A request
  goes on from the cache that shares the longest prefix with it: the conversation's own, cut back to where
  both part, or else a copy of another's (so a system text is computed once). Oldest ones go when there is
  more than ``--kv-gib``.
- ``--mode batching``: its continuous batching, which shares blocks of a prefix by itself.

Standard library only, besides torch and transformers: a thread for each connection, and the engine's own.
"""

from __future__ import annotations

import argparse
import copy
import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
)
from transformers.generation.streamers import BaseStreamer

PAGE_TOKENS = 256
NEVER_A_TOKEN = -1


class Engine(Protocol):
    def generate(self, ids: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Tokens as they come, each with how many tokens of the prompt were not computed."""


class Kept(NamedTuple):
    """A cache, the tokens whose KV is in it, and how many of them were the last request's prompt."""

    ids: list[int]
    num_prompt: int
    cache: DynamicCache


class KeptCaches:
    """`generate` with caches that outlive their request."""

    def __init__(self, model: Any, kv_bytes: int) -> None:
        self._model = model
        self._lock = threading.Lock()
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
        self._max_tokens = kv_bytes // token_bytes
        self._kept: list[Kept] = []  # oldest first

    def generate(self, ids: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
        tokens: queue.SimpleQueue[tuple[int, int] | BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(ids, max_tokens, tokens), daemon=True).start()
        while (item := tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self, ids: list[int], max_tokens: int, tokens: queue.SimpleQueue[Any]) -> None:
        with self._lock:
            try:
                cache, num_cached = self._take(ids)
                streamer = _Streamer(tokens, num_cached)
                output = self._model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    cache=cache,
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    eos_token_id=NEVER_A_TOKEN,
                    streamer=streamer,
                )
                # The last token has been chosen, not computed: it has no KV.
                self._keep(Kept(output[0].tolist()[: cache.get_seq_length()], len(ids), cache))
                tokens.put(None)
            except Exception as error:
                tokens.put(error)
                raise

    def _take(self, ids: list[int]) -> tuple[DynamicCache, int]:
        shared = [_common(ids, kept.ids) for kept in self._kept]
        best = max(range(len(shared)), key=shared.__getitem__, default=None)
        if best is None or shared[best] == 0:
            return DynamicCache(config=self._model.config), 0
        kept = self._kept[best]
        # The last token has to be computed: its logits are what is wanted.
        length = min(shared[best], len(ids) - 1)
        if shared[best] >= kept.num_prompt:  # the next turn of that conversation
            del self._kept[best]
            cache = kept.cache
        else:
            cache = copy.deepcopy(kept.cache)
        if surplus := cache.get_seq_length() - length:
            cache.crop(-surplus)
        return cache, length

    def _keep(self, kept: Kept) -> None:
        self._kept.append(kept)
        while len(self._kept) > 1 and sum(len(kept.ids) for kept in self._kept) > self._max_tokens:
            del self._kept[0]


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands tokens over one by one; the first thing `generate` puts is the prompt."""

    def __init__(self, tokens: queue.SimpleQueue[Any], num_cached: int) -> None:
        self._tokens, self._num_cached = tokens, num_cached
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._tokens.put((int(value.reshape(-1)[0]), self._num_cached))
        self._is_prompt = False

    def end(self) -> None:
        pass


class Batching:
    """Continuous batching; one thread hands out what it makes."""

    def __init__(self, model: Any, kv_bytes: int) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        block_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * PAGE_TOKENS
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NEVER_A_TOKEN, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS, num_blocks=kv_bytes // block_bytes, max_batch_tokens=512
            ),
        )
        self._manager.start()
        self._queues: dict[str, queue.SimpleQueue[Any]] = {}
        self._number = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._hand_out, daemon=True).start()

    def generate(self, ids: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
        mine: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self._number += 1
            name = f"request {self._number}"
            self._queues[name] = mine
        self._manager.add_request(
            ids, request_id=name, max_new_tokens=max_tokens, streaming=True, eos_token_id=NEVER_A_TOKEN
        )
        num_seen = 0
        while True:
            output = mine.get()
            if output.error is not None:
                raise RuntimeError(output.error)
            for token in output.generated_tokens[num_seen:]:
                yield token, 0  # it does not say what it shared
            num_seen = len(output.generated_tokens)
            if output.is_finished():
                del self._queues[name]
                return

    def _hand_out(self) -> None:
        for output in self._manager:
            self._queues[output.request_id].put(output)


def _common(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class Handler(BaseHTTPRequestHandler):
    """`GET /v1/models` and streamed `POST /v1/chat/completions`; every answer has its full length."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine
    tokenizer: Any

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "model", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        rendered = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=False
        )
        ids = self.tokenizer(rendered, add_special_tokens=False).input_ids
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        answer: list[int] = []
        num_sent = num_saved = 0
        for token, saved in self.engine.generate(ids, body["max_tokens"]):
            num_saved = saved
            answer.append(token)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if not text.endswith("\N{REPLACEMENT CHARACTER}") and len(text) > num_sent:
                self._event([{"index": 0, "delta": {"content": text[num_sent:]}, "finish_reason": None}])
                num_sent = len(text)
        self._event([{"index": 0, "delta": {}, "finish_reason": "length"}])
        self._event([], self._usage(len(ids), len(answer), num_saved))
        self._piece(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _usage(self, num_prompt: int, num_answer: int, num_cached: int) -> dict[str, Any]:
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> None:
        event = {"id": "chat", "object": "chat.completion.chunk", "created": int(time.time())}
        event |= {"model": "model", "choices": choices, "usage": usage}
        self._piece(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _piece(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--mode", choices=("kept", "batching"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    kv_bytes = options.kv_gib * 2**30
    Handler.engine = KeptCaches(model, kv_bytes) if options.mode == "kept" else Batching(model, kv_bytes)
    Handler.tokenizer = AutoTokenizer.from_pretrained(options.model)
    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
