# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Two hosts on one machine: network namespaces with their own addresses and names, and one shared folder.

    with two_hosts(tmp_path, names=("one", "two")) as cluster:
        first = cluster.hosts[0].launch("--training.steps=60", NNODES="1:2", NODE_RANK="0")
        cluster.hosts[1].cut()

Each host has an address (10.77.0.1 and 10.77.0.2), a host name that both resolve, and a link to a bridge. Each launch
has its own process ids, so killing it leaves nothing of it. The shared folder is a tmpfs, so it can be full. What this
cannot show: the caches and locks of a file server, and times of files, which come from the one kernel. A host's clock
is set off only for Python (`time.time`, `datetime.now`); torchrun and the trainer read it nowhere else.

All of it ends with this process. It needs root on Linux, with `unshare`, `nsenter`, `setpriv`, `ip` and `bridge`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PORT = 29500
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# In the hosts' Python: the clock is off by CLOCK_OFF_S, and each sample takes the seconds in the file PACE.
SITE = """
import os, sys, threading, time
off = float(os.environ.get("CLOCK_OFF_S", 0))
if off:
    import datetime as datetime_module
    real = time.time
    time.time = lambda: real() + off
    class datetime(datetime_module.datetime):  # pickles as the class that it replaces
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime_module.timedelta(seconds=off)
    datetime.__module__, datetime.__qualname__ = "datetime", "datetime"
    datetime_module.datetime = datetime

def slow_down():
    while (dummy := getattr(sys.modules.get("torchditan.datasets.dummy"), "Dummy", None)) is None:
        time.sleep(0.01)
    read = dummy.__getitem__
    def slowly(self, index):
        try:
            time.sleep(float(open(os.environ["PACE"]).read()))
        except (OSError, ValueError):
            pass
        return read(self, index)
    dummy.__getitem__ = slowly

if "RANK" in os.environ:
    threading.Thread(target=slow_down, daemon=True).start()
"""


class Host:
    """One of the two hosts."""

    def __init__(self, cluster: Cluster, number: int, name: str) -> None:
        self.cluster = cluster
        self.address = ADDRESSES[number]
        self.name = name
        self.clock_off_s = 0
        self.launches = 0
        self.port = f"port{number}"
        setup = f"hostname {name} && mount --bind {cluster.home}/hosts /etc/hosts && ip link set lo up"
        self.pid = cluster.start_holder("--net", "--uts", "--mount", f"{setup}")
        cluster.run(f"ip link add {self.port} type veth peer name eth0 netns {self.pid}")
        cluster.run(f"ip link set {self.port} master bridge0 up")
        self.run(f"ip address add {self.address}/24 dev eth0 && ip link set eth0 up")

    def run(self, command: str) -> str:
        """Run a shell command on this host."""
        return run_in(self.pid, command)

    def launch(self, *flags: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start `scripts/launch.sh` here. Killing the process kills all that it started."""
        self.launches += 1
        inherited = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        environment = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.cluster.home}/site",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CLOCK_OFF_S": str(self.clock_off_s),
            "PACE": str(self.cluster.home / "pace"),
            "MASTER_ADDR": self.cluster.hosts[0].address,
            "MASTER_PORT": str(PORT),
            "NODE_RANK": str(self.cluster.hosts.index(self)),
            "NGPU": "1",
            **variables,
        }
        command = [*DIES_WITH_US, "nsenter", f"--target={self.pid}", "--net", "--uts", "--mount"]
        command += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += [str(REPOSITORY / "scripts/launch.sh"), *flags]
        with open(self.log, "wb") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=self.cluster.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.cluster.launched.append(process)
        return process

    @property
    def log(self) -> Path:
        """What the last launch printed."""
        return self.cluster.home / f"{self.name}-{self.launches}.log"

    def cut(self) -> None:
        """Packets to and from this host vanish; no end sees it."""
        self.cluster.run(f"bridge link set dev {self.port} state 0")

    def mend(self) -> None:
        self.cluster.run(f"bridge link set dev {self.port} state 3")


class Cluster:
    """Two hosts and their shared folder. Create it with `two_hosts`."""

    def __init__(self, home: Path, *, size: str) -> None:
        self.home = home
        self.hosts: list[Host] = []
        self.launched: list[subprocess.Popen[bytes]] = []
        self.holders: list[subprocess.Popen[str]] = []
        self.pid = os.getpid()
        share = f"mount -t tmpfs -o size={size} shared {home}/shared"
        bridge = "ip link add bridge0 type bridge && ip link set bridge0 up"
        self.pid = self.start_holder("--net", "--mount", f"{share} && {bridge}")

    def start_holder(self, *namespaces_and_setup: str) -> int:
        *namespaces, setup = namespaces_and_setup
        enter = [] if self.pid == os.getpid() else ["nsenter", f"--target={self.pid}", "--net", "--mount"]
        holder = subprocess.Popen(
            [
                *DIES_WITH_US,
                *enter,
                "unshare",
                *namespaces,
                "sh",
                "-c",
                f"{setup} && echo ready && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.holders.append(holder)
        assert holder.stdout is not None
        said = holder.stdout.readline()
        if said != "ready\n":
            holder.kill()
            raise PermissionError(said.strip())
        return holder.pid

    def run(self, command: str) -> str:
        """Run a shell command where the bridge and the shared folder are."""
        return run_in(self.pid, command)

    @property
    def shared(self) -> Path:
        """The shared folder, as this process sees it. The hosts see it at `home / "shared"`."""
        return Path(f"/proc/{self.pid}/root{self.home}/shared")

    def set_pace(self, seconds_per_sample: float | None) -> None:
        """Slow the runs down, so that something can happen to them; None: full speed."""
        pace = self.home / "pace"
        pace.unlink(missing_ok=True)
        if seconds_per_sample is not None:
            pace.write_text(str(seconds_per_sample))

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """The shared folder takes no more bytes."""
        filler = self.shared / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                file.flush()
        yield
        filler.unlink()

    def close(self) -> None:
        for process in self.launched:
            process.kill()
            process.wait()
        for holder in reversed(self.holders):
            holder.kill()
            holder.wait()


def run_in(pid: int, command: str) -> str:
    enter = ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "sh", "-c", command]
    return subprocess.run(enter, check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts(folder: Path, *, names: Sequence[str] = ("one", "two"), size: str = "60m") -> Iterator[Cluster]:
    """Two hosts that share `folder / "shared"`, a disk of `size`. Host 0 is the one where ranks meet.

    Raises:
        PermissionError: this machine permits no namespaces.
    """
    (folder / "shared").mkdir(parents=True)
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITE)
    lines = [f"{address} {name}" for address, name in zip(ADDRESSES, names, strict=True)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with contextlib.ExitStack() as stack:
        try:
            cluster = Cluster(folder, size=size)
            stack.callback(cluster.close)
            for number, name in enumerate(names):
                cluster.hosts.append(Host(cluster, number, name))
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError(f"this machine permits no network namespaces: {error}") from error
        yield cluster
