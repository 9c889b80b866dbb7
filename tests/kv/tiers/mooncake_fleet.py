"""A Mooncake store of real processes on this machine, and ways to kill them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

# Lends memory until its input ends.
_PEER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, size = sys.argv[1:]
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(size), 16 << 20, "tcp", "", master)
print(code, flush=True)
sys.stdin.read()
store.close()
"""


class Fleet:
    """A master, and peers that lend memory to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, self._metrics_port = _free_port(), _free_port()
        self.processes: list[subprocess.Popen[str]] = []
        self.master = self.start_master()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_master(self) -> subprocess.Popen[str]:
        import mooncake

        binary = Path(mooncake.__path__[0]) / "mooncake_master"
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self._metrics_port}"]
        with (self._folder / "master.log").open("a") as log:
            times = ["--client_ttl=3", "--default_kv_lease_ttl=500"]
            self.master = subprocess.Popen([binary, *ports, *times], stdout=log, stderr=log, text=True)
        self.processes.append(self.master)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self.master
            assert self.master.poll() is None, (self._folder / "master.log").read_text()
            _pause(0.05)
        raise AssertionError("mooncake_master does not listen")

    def start_peer(self, lent_bytes: int = 64 << 20) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _PEER, self.address, str(lent_bytes)]
        with (self._folder / "peer.log").open("a") as log:
            peer = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.processes.append(peer)
        assert peer.stdout is not None
        lines = iter(peer.stdout.readline, "")
        assert any(line.strip() == "0" for line in lines), (self._folder / "peer.log").read_text()
        return peer

    def kill(self, process: subprocess.Popen[str]) -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self.processes.remove(process)

    def close(self) -> None:
        for process in list(self.processes):
            self.kill(process)


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Skips where Mooncake's package or its libraries are not installed."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with closing(Fleet(folder)) as started:
        yield started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pause(duration_s: float) -> None:
    import time

    time.sleep(duration_s)
