"""A SLURM cluster of two nodes on this machine, for as long as a test session needs it.

Nothing is installed and nothing outside one temporary folder is written: munged, slurmctld and two slurmd run as the
current user, who must be root for slurmd, and are ended by their process ids.
"""

import contextlib
import os
import shutil
import socket
import subprocess

from support.launches import wait_for
from support.processes import clean_environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
PACKAGES = "munge slurmctld slurmd slurm-client"
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
CONFIGURATION = """
ClusterName=treadle
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
MpiDefault=none
ReturnToService=2
KillWait=5
PropagateResourceLimits=NONE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def obstacle():
    """Says why no cluster can run here, or None if one can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install --no-install-recommends {PACKAGES}"
    return None if os.geteuid() == 0 else "slurmd starts jobs as their owners, so only root can run it"


class Cluster:
    """Two nodes, n1 and n2, with four CPUs each. Use as a context manager."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        self.env = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self):
        folder = self.folder
        (folder / "state").mkdir()
        folder.chmod(0o755)  # munged refuses a socket whose folder others may write to, or can't enter
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        with contextlib.ExitStack() as taken:  # until all are known, so that they differ
            servers = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [server.getsockname()[1] for server in servers]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname(), ports=ports))
        names = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        files = [f"--{option}={folder / name}" for option, name in names.items()]
        self._daemon("munged", "--foreground", "--force", f"--log-file={folder / 'munged.log'}", *files)
        wait_for(lambda: (folder / "munge.socket").exists(), 20, self._read_logs)
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%D %t").stdout.split() == ["2", "idle"], 60, self._read_logs)

    def _read_logs(self):
        return "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.[lo]*")))

    def _daemon(self, program, *args):
        with (self.folder / f"{program}.out").open("ab") as out:
            command = [shutil.which(program, path=PATH) or program, *args]
            env = {**os.environ, **self.env}
            self.daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))

    def run(self, *command, timeout=120, env=None, cwd=None):
        """Runs one of SLURM's programs, with a clean environment of launch variables, and returns what it said."""
        return subprocess.run(
            command,
            env=clean_environment({**self.env, **(env or {})}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=cwd or self.folder,
        )
