"""A real Slurm of four nodes in a temporary folder on this host: munge, a controller and four node daemons.

Debian's slurmd is built so that several can run on one host. Every daemon runs in the foreground in a session of its
own, and only these are ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launchers.local import end_with

NODES = [f"node{number}" for number in range(1, 5)]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
_CONFIGURATION = """\
ClusterName=testcluster
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
{addresses}
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
MinJobAge=600
SlurmctldTimeout=10
SlurmdTimeout=5
CompleteWait=0
BatchStartTimeout=10
MessageTimeout=5
UnkillableStepTimeout=10
OverTimeLimit=0
GresTypes=gpu
NodeName=node[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=32 Boards=1 SocketsPerBoard=2 \
CoresPerSocket=16 ThreadsPerCore=1 RealMemory=65536 Gres=gpu:h100:8 State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10 \
PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=100 PreemptMode=OFF
"""
_GRES = "AutoDetect=off\nNodeName=node[1-4] Name=gpu Type=h100 File={folder}/dev/gpu[0-7]\n"
_KILL_WAIT_S = 15  # time to save after SIGTERM; 30 on real clusters


def missing() -> list[str]:
    """Programs that a cluster needs and that are not installed here."""
    return [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


class LocalCluster:
    """A running cluster; `close` ends it. root: whether nodes have names of their own, as only root can give."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = os.geteuid() == 0
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._files()
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------- starting

    def _files(self) -> None:
        for name in ("munge", "ctld", "spool", "log", "dev", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        for number in range(8):
            (self.folder / "dev" / f"gpu{number}").symlink_to("/dev/null")
        host = socket.gethostname().split(".")[0]
        local = socket.gethostbyname(host).startswith("127.")
        ports = _free_ports(5)
        import pwd

        text = _CONFIGURATION.format(
            host=host, user=pwd.getpwuid(os.geteuid()).pw_name, folder=self.folder, port=ports[0], first=ports[1],
            last=ports[4], kill_wait=_KILL_WAIT_S,
            addresses="CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if local else "",
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(_GRES.format(folder=self.folder))
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in [host, *NODES])
        )
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    @property
    def environment(self) -> dict[str, str]:
        """For clients of Slurm, and for daemons."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def _start_all(self) -> None:
        munge = self.folder / "munge"
        names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "munged", "-F", "--force", *(f"--{key}={munge / name}" for key, name in names.items()))
        self.wait_for(lambda: (munge / "sock").exists(), 10, "munge's socket")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.node_states() == {node: "idle" for node in NODES}, 30, "four idle nodes")

    def start_node(self, node: str) -> None:
        """Start, or start again, a node's daemon."""
        daemon = ["slurmd", "-D", "-N", node]
        if self.root:
            inner = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {node} && exec "$@"'
            daemon = ["unshare", "-m", "-u", "sh", "-c", inner, "sh", *daemon]
        self._start(node, *daemon)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / "log" / f"{name}.out", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=end_with(os.getpid()),
            )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- using

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """The output of a client of Slurm."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: code {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def node_states(self) -> dict[str, str]:
        try:
            said = self.run("sinfo", "-h", "-N", "-p", "train", "-o", "%N %t", timeout=10)
        except (AssertionError, subprocess.TimeoutExpired):
            return {}
        return dict(line.split() for line in said.splitlines())

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    def kill_node(self, node: str) -> None:
        """kill -9 of a node's daemon and of all that it has started, as when the machine loses power."""
        victims = [pid for pid in _processes() if _is_of_node(pid, node, self.folder)]
        daemon = self._daemons.pop(node)
        for pid in [daemon.pid, *victims]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def silence_controller(self) -> None:
        """Stop the controller: clients reach its port and get no answer."""
        self._daemons["slurmctld"].send_signal(signal.SIGSTOP)

    def wake_controller(self) -> None:
        self._daemons["slurmctld"].send_signal(signal.SIGCONT)
        self.wait_for(lambda: len(self.node_states()) == len(NODES), 30, "an answer of the controller")

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until something is so; shows the daemons' last words if it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:.0f} s for {what}\n{self.last_words()}")
            time.sleep(0.1)

    def last_words(self) -> str:
        parts = []
        for file in sorted((self.folder / "log").iterdir()):
            lines = file.read_text(errors="replace").splitlines()[-8:]
            parts += [f"--- {file.name}", *lines]
        return "\n".join(parts)

    def close(self) -> None:
        """End all jobs, then every daemon that was started here."""
        if "slurmctld" in self._daemons:
            with contextlib.suppress(Exception):
                jobs = self.run("squeue", "-h", "-o", "%A", timeout=10).split()
                if jobs:
                    self.run("scancel", "-f", "-s", "KILL", *jobs, timeout=10)
                    self.run("scancel", *jobs, timeout=10)
                    self.wait_for(lambda: not self.run("squeue", "-h", timeout=10), 20, "the end of all jobs")
        for name in [*NODES, "slurmctld", "munged"]:
            daemon = self._daemons.pop(name, None)
            if daemon is None:
                continue
            daemon.terminate()
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in _processes():
            if any(_is_of_node(pid, node, self.folder) for node in NODES):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()
    ]


def _is_of_node(pid: int, node: str, folder: Path) -> bool:
    """Whether a process belongs to a job of this cluster's node, or is the step daemon that keeps it."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if f"SLURM_CONF={folder / 'slurm.conf'}".encode() not in variables:
        return False
    if f"SLURMD_NODENAME={node}".encode() in variables:
        return True
    return b"slurmstepd" in name and _started_by(pid, node)


def _started_by(pid: int, node: str) -> bool:
    """Whether a step daemon has a child, or a child's child, that is a task on the node."""
    for child in _children(pid):
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={node}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return True
    return False


def _children(pid: int) -> list[int]:
    found = []
    for other in _processes():
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(other)
    return found


def _free_ports(count: int) -> list[int]:
    """So many free ports in a row."""
    for first in range(17000 + os.getpid() % 1000 * 10, 60000, 10):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


if __name__ == "__main__":  # a cluster to try things on: python tests/slurm/local_cluster.py FOLDER
    cluster = LocalCluster(Path(sys.argv[1]).absolute())
    print(f"export SLURM_CONF={cluster.folder}/slurm.conf", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.close()
