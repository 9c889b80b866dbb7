"""What ``ostinato replay`` does, once its options are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from ostinato.errors import ParameterError, TraceError
from ostinato.kv.policies import POLICY_NAMES, make_policy
from ostinato.types import TokenArray

from .compare import OPTIMUM
from .faults import Chance, FaultyReplay
from .replay import ReplayClock
from .sessions import read_session
from .tiered import memory_folder
from .traces import Blocks, Trace, merge_sessions, read_mooncake

DEFAULT_CAPACITIES = (1000, 5859, 10_000, 30_000)


def read_traces(
    paths: Sequence[Path],
    *,
    encode: Callable[[], Callable[[str], TokenArray]],
    block_tokens: int,
    chance: Chance,
    span_s: float,
) -> list[Trace]:
    """Every Mooncake file as a trace; all sessions (files or folders of them) merged into one.

    Sessions start within ``span_s`` seconds, at moments drawn from ``chance``; ``encode`` is called only if
    there are any. Raises ``TraceError`` for what is neither.
    """
    traces: list[Trace] = []
    sessions: list[Path] = []
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"no .jsonl files in {path}")
        for file in files:
            if _is_mooncake(file):
                traces.append(read_mooncake(file))
            else:
                sessions.append(file)
    if sessions:
        blocks, encoder = Blocks(block_tokens), encode()
        read = [blocks.of(read_session(file, encoder)) for file in sessions]
        starts_s = [chance.random() * span_s for _ in read]
        traces.append(merge_sessions(read, starts_s, f"{len(read)} sessions"))
    return traces


def _is_mooncake(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            row = orjson.loads(file.readline())
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}, line 1: not JSON ({error})") from error
    return isinstance(row, dict) and "hash_ids" in row


def policy_names(given: str) -> list[str]:
    """``all``, or names with commas between; LRU first and the optimum last, always."""
    names = (
        list(POLICY_NAMES) if given == "all" else [name.strip() for name in given.split(",") if name.strip()]
    )
    unknown = [name for name in names if name not in POLICY_NAMES and name != OPTIMUM]
    if unknown:
        known = ", ".join(POLICY_NAMES)
        raise ParameterError(f"no policy {unknown[0]!r}; there are: {known}, or all", param="policy")
    others = [name for name in names if name not in ("lru", OPTIMUM)]
    return ["lru", *dict.fromkeys(others), OPTIMUM]


def capacities_for(trace: Trace, given: str | None) -> list[int]:
    """Numbers of blocks with commas between, or shares of the trace's distinct blocks (``5%``)."""
    if given is None:
        return [size for size in DEFAULT_CAPACITIES if size >= _longest(trace)] or [_longest(trace)]
    sizes = _sizes(trace, given)
    for size in sizes:
        if size < _longest(trace):
            raise ParameterError(
                f"{size} blocks do not hold the longest request of {trace.name}, {_longest(trace)} blocks",
                param="capacity",
            )
    return sizes


def tier_capacities_for(trace: Trace, given: str | None) -> list[int]:
    """The same for a tier below: ``[0]`` where none is meant."""
    return [0] if given is None else _sizes(trace, given)


def _sizes(trace: Trace, given: str) -> list[int]:
    sizes: list[int] = []
    distinct = len({unit for request in trace.requests for unit in request.units.tolist()})
    for text in given.split(","):
        try:
            share = float(text.strip().removesuffix("%"))
            size = int(distinct * share / 100) if text.strip().endswith("%") else int(text)
        except ValueError:
            raise ParameterError(f"{text!r} is no capacity; write 5859 or 5%", param="capacity") from None
        if size < 0:
            raise ParameterError(f"{text!r} is no capacity: it is below 0", param="capacity")
        sizes.append(size)
    return sizes


def _longest(trace: Trace) -> int:
    return max(len(request.units) for request in trace.requests)


def play_faults(
    trace: Trace,
    names: Sequence[str],
    capacity: int,
    make_chance: Callable[[], Chance],
    *,
    num_requests: int,
    tier_capacity: int = 0,
) -> list[dict[str, object]]:
    """Each policy under the same faults; books and contents checked after every event.

    With a ``tier_capacity`` in blocks there is a tier below, which fails too. Raises ``AssertionError`` for
    the first thing that is wrong; its notes say where.
    """
    found: list[dict[str, object]] = []
    for name in names:
        if name == OPTIMUM:
            continue
        clock = ReplayClock()
        policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
        with ExitStack() as stack:
            folder = None
            if tier_capacity:
                made = stack.enter_context(TemporaryDirectory(prefix="ostinato-replay-", dir=memory_folder()))
                folder = Path(made) / "tier"
            faulty = FaultyReplay(
                capacity, policy, clock, make_chance(), tier_folder=folder, tier_capacity=tier_capacity
            )
            stack.callback(faulty.close)
            counts = faulty.run(trace.requests[:num_requests])
        found.append({"trace": trace.name, "policy": name, "capacity": capacity, **asdict(counts)})
    return found
