"""Makes the pictures of docs/tour.md: real Chromium, real traffic, a small random model.

With the name of a model behind it: that one. A random model is quick, and its answers are noise.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ostinato
from dashboard.browser import Watched, chromium
from dashboard.stage import ADMIN, SYSTEM, Stage, on_stage, play, save_prompts
from doors.tiny import save_tiny_chat_model

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
KEYS = "sk-anna,sk-ben,sk-clara"
MORE = [
    "What is a hurdy-gurdy?",
    "Who built the first piano?",
    "What does a sackbut sound like?",
    "How many keys has a celesta?",
    "Which instruments has a gamelan?",
]


def traffic(stage: Stage, *, rounds: int) -> None:
    """Turns of chats, agents, documents and single questions of three tenants."""
    model = stage.engine.runtime.model_name
    for number in range(rounds):
        for key in KEYS.split(","):
            with stage.client(key) as client:
                num = play(client, model, max_tokens=12)
                asked = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": MORE[number % len(MORE)]},
                ]
                client.chat.completions.create(model=model, messages=asked, temperature=0, max_tokens=16)  # type: ignore[arg-type]
                stage.recorded(num + 1)
        print(f"round {number + 1} of {rounds}", flush=True)


def pictures(stage: Stage) -> None:
    seen = [e for e in stage.dashboard.recent.newest(1000) if e.num_messages > 4]
    chat = next((e for e in seen if 0.3 < (e.hit_rate or 0.0) < 0.9), seen[0])  # some of it computed
    survey = stage.engine.runtime.surveyor.survey()
    node = max(survey.nodes, key=lambda each: each.num_uses * each.num_tokens)
    pages = {
        "overview": ("/?last=300", 1280, 1010),
        "tree": ("/dashboard/tree", 1280, 860),
        "node": (f"/dashboard/tree/{node.serial}", 1280, 700),
        "requests": ("/dashboard/requests", 1280, 760),
        "request": (f"/dashboard/requests/{chat.name}", 1280, 1100),
        "memory": ("/dashboard/memory", 1280, 1000),
    }
    with chromium() as browser:
        for scheme in ("light", "dark"):
            for name, (path, width, height) in pages.items():
                take(browser, stage, PICTURES / f"{name}-{scheme}.png", path, width, height, scheme)
        take(browser, stage, PICTURES / "overview-narrow.png", "/?last=300", 390, 844, "light")


def take(browser: object, stage: Stage, file: Path, path: str, width: int, height: int, scheme: str) -> None:
    watched = Watched(browser, stage.url, viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    watched.sign_in()
    page = watched.go(path)
    if path == "/dashboard/tree":
        page.locator("#icicle[data-ready]").wait_for()
    page.wait_for_timeout(700)
    page.screenshot(path=file)
    watched.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = sys.argv[1] if len(sys.argv) > 1 else save_tiny_chat_model(folder / "example", max_len=4096)
        rounds = 3
        settings = {"kv_cache": "24MiB", "shared_tier": folder / "tier", "shared_tier_bytes": "64MiB"}
        with (
            ostinato.load(model, template="qwen2.5", prompts=save_prompts(folder), **settings) as engine,  # type: ignore[arg-type]
            on_stage(engine, api_keys=KEYS, admin_key=ADMIN, dollars_per_hour=1.2) as stage,
        ):
            traffic(stage, rounds=rounds)
            engine.pin([{"role": "system", "content": SYSTEM}])
            pictures(stage)
    print(f"pictures in {PICTURES.name}, after {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
