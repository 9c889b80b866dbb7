"""Real texts to judge answers on: Python's language reference, and prompts of recorded agent sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SESSIONS = Path(__file__).parents[2] / "shared" / "data" / "traces" / "agent"
TOPICS = (("formatstrings", 512), ("compound", 700), ("execmodel", 900), ("strings", 1100), ("types", 1300))
TRACES = (("miniswe", 1500), ("miniswe", 1024), ("magagent", 1200), ("magagent", 800), ("taubench", 600))


def texts(sessions: Path) -> Iterator[tuple[str, str, int]]:
    """A name, a text, and how many tokens of it to take."""
    from pydoc_data.topics import topics

    for name, length in TOPICS:
        yield f"pydoc {name}", topics[name], length
    if not sessions.is_dir():
        print(f"  skipped the agent sessions: there is no folder {sessions}")
        return
    for place, (kind, length) in enumerate(TRACES):
        files = sorted(path for path in (sessions / kind).glob("*.jsonl") if path.stat().st_size > 15_000)
        lines = [json.loads(line) for line in files[place % 2].read_text().splitlines()]
        prompts = [line["input"] for line in lines if isinstance(line["input"], str)]
        yield f"{kind} {place % 2}", max(prompts, key=len), length
