"""A Slurm of this machine: real daemons on loopback, two emulated nodes, with or without accounting, in a folder.

Each daemon is a child of this process, in the foreground, and is stopped by its pid. Nothing outside of the folder is
written; the commands (`sbatch`, `squeue`, ...) find the cluster by SLURM_CONF.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct", "sacctmgr")
NODES = ("node1", "node2")

NODE_DOWN_S = 10
"""Slurm takes a node that is silent for this long for lost."""

KILL_WAIT_S = 20
"""Time between SIGTERM and SIGKILL for a job that Slurm ends."""

GRACE_S = 20
"""The same for a job of the partition `low` that is preempted."""

# Daemons listen on all addresses: told not to (NoInAddrAny), they listen on the address of the machine's own name,
# which is 127.0.1.1 on an installed Debian and none in a bare one, while the others answer to 127.0.0.1.
_CONF = """\
ClusterName=workbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdPidFile={home}/%n.pid
SlurmdLogFile={home}/%n.log
SlurmdSpoolDir={home}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout={node_down_s}
KillWait={kill_wait_s}
OverTimeLimit=0
ReturnToService=2
JobRequeue=1
AccountingStorageType={storage}
{more}
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=8 RealMemory=64000 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=8 RealMemory=64000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=10 MaxTime=INFINITE DefMemPerCPU=1
PartitionName=low Nodes=ALL State=UP PriorityTier=1 GraceTime={grace_s} MaxTime=INFINITE DefMemPerCPU=1
PartitionName=one Nodes=node1 State=UP PriorityTier=10 MaxTime=INFINITE DefMemPerCPU=1
"""

_CGROUP = "CgroupPlugin=cgroup/v1\n"
"""Detection, the default, ends a slurmd where no cgroup is mounted. Nothing here uses cgroups; the plugin of version 1
then touches none."""

_DBD = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={database}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
LogFile={home}/slurmdbd.log
PidFile={home}/slurmdbd.pid
"""


class Cluster:
    """Daemons of a Slurm that run in `home`; see `running`."""

    def __init__(self, home: Path, *, accounting: bool) -> None:
        self.home, self.accounting = home, accounting
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the commands of Slurm find this cluster."""
        return {"SLURM_CONF": str(self.home / "slurm.conf"), "MYSQL_UNIX_PORT": str(self.home / "mariadb.socket")}

    def command(self, *arguments: str, check: bool = True) -> str:
        """Output of a command of Slurm."""
        done = subprocess.run(
            arguments, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done.stdout

    def stop_node(self, name: str) -> None:
        """Stop the daemon of a node, which is silent then. Processes of its jobs continue, unlike on a lost machine."""
        self._daemons[name].send_signal(signal.SIGSTOP)

    def continue_node(self, name: str) -> None:
        """Let the daemon of a node continue, and wait until the node takes jobs."""
        self._daemons[name].send_signal(signal.SIGCONT)
        self.wait_for_nodes()

    def states(self) -> dict[str, str]:
        """State of each node."""
        lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).splitlines()
        return dict(line.split() for line in lines)

    def wait_for_nodes(self) -> None:
        """Wait until both nodes take jobs."""
        until(lambda: set(self.states().values()) <= {"idle", "mixed", "allocated"} and bool(self.states()), 60)

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", job_id)))

    def empty(self) -> None:
        """End every job, at once, and make both nodes take jobs."""
        self.command("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        self.command("scancel", "--user=root", check=False)
        until(lambda: not self.command("squeue", "--noheader", check=False).strip(), KILL_WAIT_S + 60)
        self.wait_for_nodes()

    def start(self) -> None:
        """Start all daemons."""
        ports = dict(zip(("controller", "node1", "node2", "database"), _free_ports(4), strict=True))
        host = socket.gethostname()
        storage = "accounting_storage/slurmdbd" if self.accounting else "accounting_storage/none"
        more = (
            f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={ports['database']}\n"
            f"AccountingStoragePass={self.home}/munge.socket"
        )
        more = more if self.accounting else ""
        values = {
            "home": self.home,
            "host": host,
            "storage": storage,
            "more": more,
            "node_down_s": NODE_DOWN_S,
            "kill_wait_s": KILL_WAIT_S,
            "grace_s": GRACE_S,
            **ports,
        }
        for folder in ("state", *(f"spool-{node}" for node in NODES)):
            (self.home / folder).mkdir()
        (self.home / "cgroup.conf").write_text(_CGROUP)
        (self.home / "slurm.conf").write_text(_CONF.format(**values))
        self._start_munge()
        if self.accounting:
            self._start_database(_DBD.format(**values))
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.home / "slurm.conf"))
        until(lambda: "UP" in self.command("scontrol", "ping", check=False), 30)
        for node in NODES:
            self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.home / "slurm.conf"))
        self.wait_for_nodes()

    def stop(self) -> None:
        """Stop every daemon, by pid, the last first."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.command("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            self.command("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, name: str, *command: str) -> None:
        output = (self.home / f"{name}.out").open("wb")
        with output:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def _start_munge(self) -> None:
        (self.home / "munge.key").write_bytes(os.urandom(128))
        (self.home / "munge.key").chmod(0o600)
        paths = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "log-file": "munge.log",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
        }
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            *(f"--{key}={self.home / name}" for key, name in paths.items()),
        )
        until(lambda: (self.home / "munge.socket").exists(), 30)

    def _start_database(self, conf: str) -> None:
        data = self.home / "mariadb"
        subprocess.run(  # by force: without it, a name of this machine that is not resolved is an error
            ["mariadb-install-db", "--no-defaults", "--force", f"--datadir={data}", "--user=root", "--skip-test-db"],
            check=True,
            capture_output=True,
            timeout=120,
        )
        self._start(
            "mariadbd",
            "mariadbd",
            "--no-defaults",
            f"--datadir={data}",
            "--user=root",
            "--skip-networking",
            f"--socket={self.home / 'mariadb.socket'}",
            "--innodb-buffer-pool-size=32M",
            "--innodb-lock-wait-timeout=900",
        )
        until(lambda: (self.home / "mariadb.socket").exists(), 60)
        (self.home / "slurmdbd.conf").write_text(conf)
        (self.home / "slurmdbd.conf").chmod(0o600)
        self._start("slurmdbd", "slurmdbd", "-D")
        until(
            lambda: "workbench" in self.command("sacctmgr", "--immediate", "add", "cluster", "workbench", check=False),
            30,
        )


@contextlib.contextmanager
def running(home: Path, *, accounting: bool) -> Iterator[Cluster]:
    """A cluster that is stopped at the end; an error of its start has the logs."""
    cluster = Cluster(home, accounting=accounting)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def missing(*, accounting: bool) -> list[str]:
    """Programs that are not installed."""
    return [name for name in (*PROGRAMS, *(ACCOUNTING if accounting else ())) if shutil.which(name) is None]


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
