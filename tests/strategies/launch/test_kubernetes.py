"""The manifests of `examples/kubernetes`: what they hold, their commands as pods on loopback, preempted and resumed."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from support.launches import wait_for
from support.processes import clean_environment, programs, run
from treadle.compat.environment import get_free_port
from treadle.engine.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
WITH_STATUS = [name for name in MANIFESTS if "exit_codes" in name]
GPU = "nvidia.com/gpu"


def load(name):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def templates(manifest):
    """The name of each pod and its template, in the order of their numbers."""
    name = manifest["metadata"]["name"]
    if manifest["kind"] == "PyTorchJob":
        specs = manifest["spec"]["pytorchReplicaSpecs"]
        return [
            (f"{name}-{kind.lower()}-{number}", specs[kind]["template"])
            for kind in ("Master", "Worker")
            for number in range(specs[kind]["replicas"])
        ]
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    return [(f"{name}-{job['name']}-0-{number}.{name}", spec["template"]) for number in range(spec["completions"])]


def controller_environment(manifest, number):
    """What the operator, or Kubernetes' own controller of jobs, adds to the containers of a pod."""
    if manifest["kind"] == "JobSet":
        return {"JOB_COMPLETION_INDEX": str(number)}
    master, count = templates(manifest)[0][0], len(templates(manifest))
    torchs = {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": str(number)}
    place = {"RANK": str(number), "WORLD_SIZE": str(count), "MASTER_ADDR": master, "MASTER_PORT": "23456"}
    return {"PYTHONUNBUFFERED": "1", **torchs, **place}


class Pods:
    """The pods of a manifest as processes of this machine. A context manager.

    Args:
        name: the manifest.
        folder: for the folder that the image has, and for the volume that the pods share.
    """

    def __init__(self, name, folder):
        self.manifest, self.folder = load(name), folder
        self.volume = folder / "checkpoints"
        self.workspace = folder / "workspace"
        make_workspace(self.workspace)
        self.port = str(get_free_port())
        self.processes = [self._start(number, *pod) for number, pod in enumerate(templates(self.manifest))]

    def _start(self, number, name, template):
        (container,) = template["spec"]["containers"]
        declared = {entry["name"]: entry["value"] for entry in container.get("env", ())}
        env = declared | controller_environment(self.manifest, number)
        assert env["MASTER_ADDR"] == templates(self.manifest)[0][0]  # its name in the cluster's DNS
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        command = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], part) for part in container["command"]]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        command = [part.replace(f"={mounts['checkpoints']}/", f"={self.volume}/") for part in command]
        path = f"{programs()}:{Path(sys.executable).parent}:/usr/bin:/bin"
        assert shutil.which(command[0], path=path)
        with (self.folder / f"log-{number}").open("w") as log:
            return subprocess.Popen(
                command,
                cwd=self.workspace,
                env=clean_environment(env | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def wait(self, seconds=60):
        """The exit status of each."""
        try:
            return [process.wait(seconds) for process in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(self.logs())

    def logs(self):
        return "\n".join((self.folder / f"log-{number}").read_text() for number in range(len(self.processes)))

    def await_step(self, step):
        """Wait for a checkpoint of at least that step."""
        has_ended = lambda: any(process.poll() is not None for process in self.processes)  # noqa: E731
        wait_for(lambda: latest_step(self.volume) >= step or has_ended(), 60, self.logs)
        assert not has_ended(), self.logs()


def make_workspace(folder):
    """Copy what the Dockerfile copies."""
    folder.mkdir(exist_ok=True)
    copied = re.findall(r"^COPY (.*) /workspace/$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    for path in " ".join(copied).split():
        shutil.copy(ROOT / path, folder)


def latest_step(volume):
    return max((manifest.step for manifest, _ in CheckpointStore(volume / "digits").scan()[0]), default=0)


def train_here(folder):
    """The same training in ranks of this test, undisturbed."""
    make_workspace(folder)
    sys.path.insert(0, str(folder))
    import train

    train.main(["--checkpoints", str(folder / "checkpoints" / "digits")])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(train_here, 2, folder)
    return final_weights(folder / "checkpoints")


def final_weights(volume):
    return torch.load(volume / "digits" / "last.ckpt", weights_only=True)["state_dict"]


def containers(manifest):
    for _, template in templates(manifest):
        for container in template["spec"]["containers"]:
            yield template["spec"], container


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_every_manifest_needs(name):
    manifest = load(name)
    count = len(templates(manifest))
    assert count == 2
    for pod, container in containers(manifest):
        command = container["command"]
        assert command[0] in ("torchrun", "treadle")  # and no shell, which would keep SIGTERM to itself
        options = dict(part.removeprefix("--").split("=", 1) for part in command if part.startswith("--"))
        assert options["nnodes"] == str(count)
        assert options["nproc-per-node"] == str(container["resources"]["limits"][GPU])
        assert command[-2] == "train.py"
        assert "grace=" in (FOLDER / "train.py").read_text()
        assert pod["terminationGracePeriodSeconds"] == 60
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/checkpoints", "/dev/shm"}
        assert container["workingDir"] == "/workspace"
        assert not manifest.keys() - {"apiVersion", "kind", "metadata", "spec"}


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.startswith("pytorchjob")])
def test_what_the_training_operator_needs(name):
    manifest = load(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    assert (list(specs), specs["Master"]["replicas"]) == (["Master", "Worker"], 1)
    assert {container["name"] for _, container in containers(manifest)} == {"pytorch"}
    policy = "ExitCode" if name in WITH_STATUS else "OnFailure"
    assert {spec["restartPolicy"] for spec in specs.values()} == {policy}
    assert manifest["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.startswith("jobset")])
def test_what_jobset_needs(name):
    manifest = load(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    spec, policy = job["template"]["spec"], manifest["spec"]["failurePolicy"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    assert spec["backoffLimit"] == 0
    assert {pod["restartPolicy"] for pod, _ in containers(manifest)} == {"Never"}
    assert policy["maxRestarts"] > 0
    if name in WITH_STATUS:
        (rule,) = policy["rules"]
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        assert spec["podReplacementPolicy"] == "Failed"  # which a podFailurePolicy needs
        statuses = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert (statuses["operator"], statuses["values"]) == ("In", [128 + signal.SIGTERM])
        assert {container["name"] for _, container in containers(manifest)} == {statuses["containerName"]}


def test_the_files_of_one_kind_differ_in_the_launcher_and_the_policies_alone():
    for kind in ("pytorchjob", "jobset"):
        lines = [
            [line for line in (FOLDER / name).read_text().splitlines() if not line.lstrip().startswith("#")]
            for name in (f"{kind}.yaml", f"{kind}_exit_codes.yaml")
        ]
        differing = [line.strip(" -") for line in lines[0] if line not in lines[1]]
        assert all(line.startswith(("torchrun", "restartPolicy", "backoffLimit", "maxRestarts")) for line in differing)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "pod"),
    [
        ("pytorchjob.yaml", 1),
        ("pytorchjob.yaml", 0),
        ("pytorchjob_exit_codes.yaml", 0),
        ("jobset.yaml", 1),
        ("jobset_exit_codes.yaml", 1),
        ("jobset_exit_codes.yaml", 0),
    ],
)
def test_a_preempted_pod_ends_all_and_the_restart_resumes_exactly(name, pod, tmp_path, undisturbed):
    with Pods(name, tmp_path) as pods:
        pods.await_step(20)
        pods.processes[pod].terminate()  # as the kubelet does: the first process of the container gets SIGTERM
        began = time.monotonic()
        statuses = pods.wait()
        assert time.monotonic() - began < 30
        # torchrun's own status is 1 for whatever ended a rank; the pod that was told to end may have its signal's.
        assert statuses == [143, 143] if name in WITH_STATUS else set(statuses) <= {1, 143, -15}, pods.logs()
    saved = latest_step(pods.volume)
    assert 20 <= saved < 120
    with Pods(name, tmp_path) as pods:
        assert pods.wait() == [0, 0], pods.logs()
        assert f"optimizer step {saved})" in pods.logs()
    weights = final_weights(pods.volume)
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[key], undisturbed[key]) for key in weights)
