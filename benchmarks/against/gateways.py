"""Gateways in front of one fake upstream: ours, and LiteLLM's proxy in an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from .environments import BUILD, Recipe, prepare
from .servers import Command, Launch, Peer

FAKE = Path(__file__).parent / "fake_upstream.py"
_LITELLM = Recipe(("litellm[proxy]==1.106.12",))


def upstream_command(port: int, **options: float) -> Command:
    arguments = [sys.executable, str(FAKE), "--port", str(port)]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return Command(arguments, {})


def upstream(**options: float) -> Peer:
    return Peer(
        "fake-upstream",
        "an upstream that costs nothing",
        lambda: Path(sys.executable).parent,
        lambda _programs, launch: upstream_command(launch.port, **options),
    )


def ours(upstream_url: str, *more: str) -> Peer:
    def command(programs: Path, launch: Launch) -> Command:
        arguments = [str(programs / Path(sys.executable).name), "-m", "ostinato", "serve"]
        return Command([*arguments, "--upstream", upstream_url, "--port", str(launch.port), *more], {})

    return Peer("ostinato-gateway", "this working copy", lambda: Path(sys.executable).parent, command)


def litellm(upstream_url: str) -> Peer:
    """Its defaults but for two: one worker, as ours has, and the price map that is in the package."""

    def command(programs: Path, launch: Launch) -> Command:
        folder = BUILD / "litellm"
        config = folder / "config.yaml"
        config.write_text(
            "model_list:\n"
            "  - model_name: fake\n"
            "    litellm_params:\n"
            "      model: openai/fake\n"
            f"      api_base: {upstream_url}/v1\n"
            "      api_key: none\n"
        )
        arguments = [str(programs / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        arguments += ["--port", str(launch.port), "--num_workers", "1", "--telemetry", "False"]
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        # No keys, as ours: neither has to look one up.
        environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
        return Command(arguments, environment)

    return Peer("litellm", _LITELLM.requirements[0], lambda: prepare("litellm", _LITELLM), command)
