"""The echo engine behind the real server, as a process: ``python tests/server/echo_server.py --port 0``.

Prints its address as the first line. Used where a test needs signals, and as a peer in benchmarks.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ostinato.server import create_app, serve, server_settings
from server.echo_engine import EchoEngine


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    engine = EchoEngine(step_s=options.step_s)
    settings = server_settings(port=options.port, drain_timeout_s=options.drain_timeout_s)
    try:
        serve(create_app(engine, settings), settings, ready=say)
    finally:
        engine.close()
    say("drained")


if __name__ == "__main__":
    main()
