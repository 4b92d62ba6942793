"""Tracking services without a network: how a test makes the logger of each, and reads with its own reader what it kept.

Each class answers the same questions, so that one test asks all of them.
"""

import atexit
import io
import json
import math
import os
import shutil
import tempfile
import zipfile
from importlib.util import find_spec

import pytest

from treadle import loggers

# Trackio reads it when it is imported, once for all tests of this process.
if "TRACKIO_DIR" not in os.environ:
    os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")
    atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)


class Service:
    """What the tests know of a service.

    Each has the methods ``make(folder, **options)``, a logger of a new run below a folder, and of a run's version in a
    folder ``rows``: steps and values by metric, in the order of writing, or of the steps where that is all there is;
    ``params``: hyperparameters, flat; ``failed``: whether it is marked as one that failed; ``files``: names of the
    files of its checkpoints.

    Attributes:
        package: what it is imported by.
        logger: the class of its logger.
        version_key: the logger's argument that names the run to continue.
        to_resume: what else it takes to continue one.
        separator: between a prefix and a metric's name.
        rewrites: a value logged once more for a step takes the place of the first, or is left out itself.
        keeps_nan: NaN and infinities come back as they are.
    """

    package = ""
    logger: type
    version_key = ""
    to_resume = {}
    separator = "-"
    rewrites: str | None = None
    keeps_nan = True

    def skip_if_missing(self):
        """Skips the test, or the whole file that is being imported. The package is not imported: its logger must be."""
        if find_spec(self.package) is None:
            pytest.skip(f"{self.package} is not installed", allow_module_level=True)

    def environment(self, folder):
        """The variables of a process that logs."""
        return {}

    def resume(self, folder, version):
        return self.make(folder, **{self.version_key: version}, **self.to_resume)


class Comet(Service):
    package = "comet_ml"
    logger = loggers.CometLogger
    version_key = "experiment_key"
    separator = "_"

    def environment(self, folder):
        return {"COMET_LOGGING_CONSOLE": "ERROR"}

    def make(self, folder, **options):
        quiet = ("log_code", "log_git_metadata", "log_git_patch", "log_env_details", "auto_output_logging")
        settings = {"project": "digits", "online": False, "offline_directory": str(folder / "comet")}
        return loggers.CometLogger(**{**settings, **dict.fromkeys(quiet, False), **options})

    def _messages(self, folder, version):
        """The messages of all archives of an experiment, which ``comet upload`` would send."""
        archives = sorted(folder.glob(f"*/{version}*.zip"), key=_changed)
        for archive in archives:
            with zipfile.ZipFile(archive) as content:
                for line in io.TextIOWrapper(content.open("messages.json")):
                    message = json.loads(line)
                    yield message["type"], message["payload"]

    def rows(self, folder, version):
        found = {}
        for kind, payload in self._messages(folder, version):
            if kind == "metric_msg" and payload["metric"]["metricName"] != "process duration":
                metric = payload["metric"]
                found.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
        return found

    def params(self, folder, version):
        found = {}
        for kind, payload in self._messages(folder, version):
            for param in (payload.get("param"), payload.get("params")) if kind == "parameter_msg" else ():
                if param and param["source"] == "manual":
                    found[param["paramName"].replace("|", "/")] = param["paramValue"]
        return found

    def failed(self, folder, version):
        others = [p for kind, p in self._messages(folder, version) if kind == "log_other" and p["key"] == "status"]
        return bool(others) and others[-1]["value"] == "failed"

    def files(self, folder, version):
        return {
            payload["additional_params"]["fileName"]
            for kind, payload in self._messages(folder, version)
            if kind == "file_upload" and payload["additional_params"]["type"] == "model-element"
        }


class ClearML(Service):
    package = "clearml"
    logger = loggers.ClearMLLogger
    version_key = "task_id"
    keeps_nan = False

    def environment(self, folder):
        return {"CLEARML_CACHE_DIR": str(folder / "clearml"), "CLEARML_LOG_LEVEL": "ERROR"}

    def make(self, folder, **options):
        own = ("auto_connect_arg_parser", "auto_connect_streams", "auto_resource_monitoring")
        frameworks = {"auto_connect_frameworks": {"detect_repository": False}}
        settings = {"project_name": "digits", "offline": True, **dict.fromkeys(own, False), **frameworks}
        return loggers.ClearMLLogger(**{**settings, **options})

    def _folder(self, folder, version):
        return folder / "clearml" / "offline" / version

    def rows(self, folder, version):
        found = {}
        with open(self._folder(folder, version) / "metrics.jsonl") as lines:
            for event in (event for line in lines for event in json.loads(line)):
                title, series = event["metric"], event["variant"]
                name = title if title == series else f"{series}_{title}"
                found.setdefault(name, []).append((event["iter"], event["value"]))
        return found

    def _task(self, folder, version):
        return json.loads((self._folder(folder, version) / "task.json").read_text())

    def params(self, folder, version):
        return {name: item["value"] for name, item in self._task(folder, version)["hyperparams"]["hparams"].items()}

    def failed(self, folder, version):
        return "failed" in (self._task(folder, version).get("tags") or [])

    def files(self, folder, version):
        paths = (self._folder(folder, version) / "data").rglob("*.ckpt")
        return {path.name.replace("0x3d", "=") for path in paths if path.is_file()}


class SwanLab(Service):
    package = "swanlab"
    logger = loggers.SwanLabLogger
    version_key = "id"
    rewrites = "first"

    def environment(self, folder):
        return {"SWANLAB_MODE": "offline", "SWANLAB_ROOT": str(folder / "root")}

    def make(self, folder, **options):
        return loggers.SwanLabLogger("digits", save_dir=folder, **{"mode": "offline", **options})

    def _records(self, folder, version):
        """The records of all folders of a run, as ``swanlab sync`` reads them."""
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        # Their names have no more than the second, and so do the folders' times.
        for file in sorted((folder / "swanlog").glob(f"run-*-{version}/run-{version}.swanlab"), key=_changed):
            reader = DataStoreReader()
            reader.open(file)
            yield from (Record.FromString(data) for data in reader)
            reader.close()

    def rows(self, folder, version):
        found = {}
        for record in self._records(folder, version):
            # Its own monitor adds rows every 10 s.
            if record.HasField("scalar") and not record.scalar.key.startswith("__swanlab__"):
                found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
        return found

    def params(self, folder, version):
        import yaml

        found = {}
        for file in sorted((folder / "swanlog").glob(f"run-*-{version}/files/config.yaml"), key=_changed):
            for name, item in (yaml.safe_load(file.read_text()) or {}).items():
                found[name] = item["value"]
        return dict(loggers.values.flatten(found))

    def failed(self, folder, version):
        states = [record.finish.state for record in self._records(folder, version) if record.HasField("finish")]
        from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

        return RunState.Name(states[-1]).endswith("CRASHED")

    def files(self, folder, version):
        return {
            item.name
            for record in self._records(folder, version)
            if record.HasField("save")
            for item in [record.save]
            if item.name.endswith(".ckpt")
        }


def _changed(path):
    return path.stat().st_mtime_ns


class Trackio(Service):
    package = "trackio"
    logger = loggers.TrackioLogger
    version_key = "name"
    to_resume = {"resume": "must"}

    def environment(self, folder):
        return {"TRACKIO_DIR": os.environ["TRACKIO_DIR"]}

    def _project(self, folder):
        return "".join(letter for letter in str(folder) if letter.isalnum())[-60:]

    def make(self, folder, **options):
        quiet = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        return loggers.TrackioLogger(self._project(folder), **{**quiet, **options})

    def _run(self, folder, version):
        from trackio import Api

        (run,) = [run for run in Api().runs(self._project(folder)) if run.name == version]
        return run

    def rows(self, folder, version):
        from trackio.sqlite_storage import SQLiteStorage

        found = {}
        for row in SQLiteStorage.get_logs(self._project(folder), version, run_id=self._run(folder, version).id):
            for name in row.keys() - {"step", "timestamp"}:
                found.setdefault(name, []).append((row["step"], float(row[name])))
        return found

    def params(self, folder, version):
        config = self._run(folder, version).config
        return dict(loggers.values.flatten({key: value for key, value in config.items() if key[0] != "_"}))

    def failed(self, folder, version):
        return [alert["title"] for alert in self._run(folder, version).alerts(level="error")] == ["Run failed"]

    def files(self, folder, version):
        import trackio

        run = trackio.init(self._project(folder), name="reader", auto_log_cpu=False, auto_log_gpu=False, embed=False)
        try:
            return {entry["path"] for entry in trackio.use_artifact(f"model-{version}:best").manifest}
        finally:
            run.finish()


SERVICES = [Comet(), ClearML(), SwanLab(), Trackio()]


def same(found, expected):
    """Whether steps and values are equal, NaN to itself too."""
    return len(found) == len(expected) and all(
        f[0] == e[0] and (f[1] == e[1] or (math.isnan(f[1]) and math.isnan(e[1])))
        for f, e in zip(found, expected, strict=True)
    )
