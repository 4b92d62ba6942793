"""Loading never executes code: files made to do harm, through every public door that takes a path."""

import codecs
import contextlib
import fnmatch
import importlib
import inspect
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from support import hostile_files
from support.models import SGDTask, loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.engine.big_models import dispatch_model

import treadle

pytestmark = pytest.mark.guarantee

PATHS = re.compile(
    r"(^|_)(path|ckpt|checkpoint|dir|directory|file|filename|source|input|folder|url|f)(_|$)|(path|file|dir)$"
)
SECONDS, MEGABYTES = 30, 800


class Task(SGDTask):
    lr = 0.0

    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.weight, self.bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))

    def training_step(self, batch, index):
        return (batch[0] @ self.weight + self.bias).sum()

    validation_step = test_step = training_step

    def predict_step(self, batch, index):
        return batch[0] @ self.weight


def trainer(*callbacks, **flags):
    flags = {"max_epochs": None, "max_steps": 2, "devices": 1, "num_sanity_val_steps": 0, **flags}
    return make_trainer(callbacks=list(callbacks), **flags)


def make_run(folder):
    run = trainer(treadle.callbacks.EMAWeightAveraging())
    run.fit(Task(), loader(2))
    run.save_checkpoint(folder / "whole", format="directory")
    return folder / "whole"


def accelerator(**options):
    made = treadle.Accelerator(cpu=True, **options)
    made.prepare(hostile_files.model())
    return made


def make_predictions(folder):
    trainer(treadle.callbacks.PredictionWriter(folder / "whole")).predict(Task(), loader(2))
    return folder / "whole"


def project(path):
    kept = treadle.engine.configuration.ProjectConfiguration(project_dir=str(path), automatic_checkpoint_naming=True)
    accelerator(project_config=kept).load_state()


def store(path):
    found = treadle.engine.CheckpointStore(path.parent if path.name == "whole" else path)
    found.find(), found.latest()
    if path.name != "whole":
        found.recover()


def best(path):
    callback = treadle.callbacks.ModelCheckpoint(dirpath=path if path.is_dir() else path.parent)
    trainer(callback, enable_checkpointing=True).fit(Task(), loader(2))


def offloaded(path):
    with treadle.init_empty_weights():
        model = hostile_files.model()
    dispatch_model(model, {"": "disk"}, "cpu", offload_dir=path)
    model(torch.ones(1, 2))


def stage(name):
    def door(path):
        getattr(trainer(), name)(Task(), loader(2), ckpt_path=path)

    return door


class Data(treadle.DataModule):
    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def settings(kind):
    return lambda path: kind.load_from_checkpoint(path.parent / "good.pt", hparams_file=path)


def exported(path):
    from treadle.cli.commands.export import export

    export(path, path.parent / "exported.safetensors")


# What reads a path: how to go through it, what must load, and which files to take there.
DOORS = {
    "load_weights(source)": (lambda path: treadle.load_weights(hostile_files.model(), path), "good.pt", "files"),
    "load_checkpoint(checkpoint_path)": (treadle.load_checkpoint, "good.pt", "files"),
    "TaskModule.load_from_checkpoint(checkpoint_path)": (Task.load_from_checkpoint, "good.pt", "files"),
    "TaskModule.load_from_checkpoint(hparams_file)": (settings(Task), "settings-good.yaml", "settings"),
    "DataModule.load_from_checkpoint(checkpoint_path)": (Data.load_from_checkpoint, "whole", "run"),
    "DataModule.load_from_checkpoint(hparams_file)": (settings(Data), "settings-good.yaml", "settings"),
    "load_checkpoint_in_model(checkpoint)": (
        lambda path: treadle.load_checkpoint_in_model(hostile_files.model(), path),
        "good.pt",
        "files",
    ),
    "load_checkpoint_and_dispatch(checkpoint)": (
        lambda path: treadle.load_checkpoint_and_dispatch(hostile_files.model(), path, {"": "cpu"}),
        "good.pt",
        "files",
    ),
    "dispatch_model(offload_dir)": (offloaded, "good.safetensors", "files"),
    "Accelerator.load_state(input_dir)": (lambda path: accelerator().load_state(path), "whole", "state"),
    "ProjectConfiguration.__init__(project_dir)": (project, "project", "projects"),
    "export(checkpoint)": (exported, "whole", "state"),
    "CheckpointStore.__init__(directory)": (store, "whole", "state"),
    "ModelCheckpoint.__init__(dirpath)": (best, "good-folder", "folders"),
    "averaged_weights(path)": (treadle.callbacks.averaged_weights, "whole", "run"),
    "Trainer.fit(ckpt_path)": (stage("fit"), "whole", "run"),
    "Trainer.validate(ckpt_path)": (stage("validate"), "whole", "run"),
    "Trainer.test(ckpt_path)": (stage("test"), "whole", "run"),
    "Trainer.predict(ckpt_path)": (stage("predict"), "whole", "run"),
    "read_predictions(path)": (lambda path: list(treadle.read_predictions(path)), "whole", "predictions"),
}
# What takes a path, or a word that sounds like one, and reads nothing there.
READ_NOTHING = {  # patterns of such names, and why
    "Accelerator.save(f)": "writes",
    "Accelerator.save_model(save_directory)": "writes",
    "Accelerator.save_state(output_dir)": "writes",
    "*.save_checkpoint(filepath)": "writes",
    "StrategyAliases.save_checkpoint(checkpoint)": "is a dict",
    "TransformersTask.save_pretrained(folder)": "writes",
    # The attack allows `eval` to torch.load, as a program might allow a class of its own, which torch then builds.
    "StrategyAliases.load_checkpoint(checkpoint_path)": "is the CheckpointIO's, whose torch.load heeds safe_globals",
    "StrategyAliases.remove_checkpoint(filepath)": "removes it unread",
    "*.on_*_checkpoint(checkpoint)": "is a dict",
    "PredictionWriter.__init__(dirpath)": "writes",
    "SingleDevice.__init__(checkpoint_io)": "is a plugin",
    "RunReport.__init__(dirpath)": "writes",
    "RunReport.__init__(filename)": "writes",
    "Trainer.__init__(default_root_dir)": "writes",
    "Accelerator.__init__(project_dir)": "writes; reading is ProjectConfiguration's",
    "ProjectConfiguration.__init__(logging_dir)": "writes",
    "ProjectConfiguration.__init__(automatic_checkpoint_naming)": "is no path",
    "ProjectConfiguration.set_directories(project_dir)": "as __init__",
    "ProfileKwargs.__init__(output_trace_dir)": "writes",
    "PackedStream.__init__(packed_source)": "is the user's stream",
    "*Checkpoint.__init__(filename)": "is a pattern of names",
    "ModelCheckpoint.format_checkpoint_name(filename)": "is a pattern of names",
    "ModelCheckpoint.to_yaml(filepath)": "writes",
    "ModelCheckpoint.file_exists(filepath)": "is only looked for",
    "OnExceptionCheckpoint.__init__(dirpath)": "writes",
    "disk_offload(offload_dir)": "writes anew what it then reads",
    "load_checkpoint_*(offload_folder)": "is not used",
    "*Logger.__init__(save_dir)": "writes; of what is there it looks at names only",
    "*Logger.__init__(log_dir)": "writes; of what is there it looks at names only",
    "*Logger.__init__(sub_dir)": "writes; of what is there it looks at names only",
    "WandbLogger.__init__(dir)": "is given to wandb",
    "WandbLogger.__init__(add_file_policy)": "is given to wandb",
    "WandbLogger.__init__(checkpoint_name)": "is given to wandb",
    "WandbLogger.download_artifact(save_dir)": "writes",
    "*Logger.log_graph(input_array)": "is a batch",
    "*Logger.after_save_checkpoint(checkpoint_callback)": "is a callback",
    "*Profiler.__init__(dirpath)": "writes",
    "*Profiler.__init__(filename)": "writes",
    "*Profiler.setup(log_dir)": "writes",
    "PyTorchProfiler.__init__(group_by_input_shapes)": "is no path",
    "Exports.to_*(file_path)": "writes",
    "Exports.to_*(input_sample)": "is a batch",
    "LightningArgumentParser.print_usage(file)": "is a stream",
    "LightningCLI.__init__(load_from_checkpoint_support)": "is no path",
    "SaveConfigCallback.__init__(config_filename)": "writes",
    "SaveConfigCallback.__init__(multifile)": "is no path",
    "SaveConfigCallback.__init__(save_to_log_dir)": "is no path",
    "claim_version(root_dir)": "writes",
    "folders(directory)": "lists names",
    "RunFolder.create(directory)": "writes",
    "RunFolder.__init__(path)": "as create and open",
    "RunFolder.open(path)": "reads JSON alone; trainer/runs/test_folder.py damages it",
    "RunFolder.prepare(path)": "as create",
    "Loader.__init__(source)": "is a loader",
    "Process.gather_for_metrics(input_data)": "is a batch",
    "World.broadcast*(source)": "is a rank",
    "TuneReportCheckpointCallback.__init__(filename)": "writes",
}


def public_paths():
    """Every parameter of a public callable of ours whose name says path, as ``owner(parameter)``."""
    rooms = [treadle, *filter(inspect.ismodule, (getattr(treadle, name) for name in treadle.__all__))]
    rooms += [importlib.import_module(f"treadle.{name}") for name in ("engine.big_models", "cli.commands.export")]
    found = set()
    for room in rooms:
        for name in getattr(room, "__all__", None) or vars(room):
            value = getattr(room, name)
            if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            methods = [m for n, m in inspect.getmembers(value, callable) if n == "__init__" or not n.startswith("_")]
            for function in methods if inspect.isclass(value) else [value]:
                if not str(getattr(function, "__module__", "")).startswith("treadle"):
                    continue
                for parameter in inspect.signature(function).parameters:
                    if PATHS.search(parameter):
                        found.add(f"{function.__qualname__}({parameter})")
    return found


def test_every_public_door_is_known():
    """A new one must be attacked too: add it to DOORS, or to READ_NOTHING with the reason."""
    found = public_paths()
    assert "load_weights(source)" in found
    assert len(found) > 30
    read_nothing = {pattern: set(fnmatch.filter(found, pattern)) for pattern in READ_NOTHING}
    assert found - {*DOORS}.union(*read_nothing.values()) == set()
    assert DOORS.keys() - found == {pattern for pattern, matched in read_nothing.items() if not matched} == set()
    assert DOORS.keys() & set().union(*read_nothing.values()) == set()


class Hung(BaseException):
    pass


EVENTS = {"exec", "compile", "pickle.find_class", "marshal.loads", "import", "os.system", "os.exec", "os.fork",
          "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo",
          "ctypes.dlopen", "code.__new__", "urllib.Request", "pty.spawn"}  # fmt: skip


def watch(folder):
    """Note what Python itself sees happen. A hook can't be removed: this is for a process that ends soon."""
    seen = []
    on = []
    # A checkpoint of another library is copied, as data, into this process's temporary folder.
    places = str(folder), os.path.join(tempfile.gettempdir(), f"treadle-{os.getpid()}-")

    def hook(event, args):
        if not on:
            return
        if event == "compile" and args[1] == "<unknown>":
            return  # parsing alone, by ast.literal_eval; running the result would be an event of its own
        if event in EVENTS:
            seen.append(f"{event} {str(args[0])[:100]}")
        elif event == "open" and set(args[1] or "") & set("wax+") and not str(args[0]).startswith(places):
            seen.append(f"{event} {args[0]} {args[1]}")

    sys.addaudithook(hook)
    return seen, on


def attack(name, folder, good, files):
    """Go through a door with every file; returns what happened, in a process of its own."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    torch.serialization.add_safe_globals([print, eval, (hostile_files.Call, "hostile_payload.Thing")])
    door = DOORS[name][0]

    def hung(*_):
        raise Hung

    signal.signal(signal.SIGALRM, hung)
    seen, on = watch(folder)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    codecs.lookup("ascii")  # a module of Python's own
    importlib.import_module("treadle.common.rank_zero")  # what warnings import
    door(Path(good))  # must work, or the rest proves nothing
    with contextlib.suppress(ValueError):
        door(Path(folder) / "pickle-eval.pt")  # what errors import
    happened, times = {}, {}
    for file, path in files.items():
        seen.clear()
        began = time.monotonic()
        signal.alarm(SECONDS)
        on.append(True)
        try:
            door(path)
            outcome = "loaded"
        except Hung:
            outcome = "hung"
        except (ValueError, TypeError, OSError) as error:
            outcome = "" if str(error) else "an error without words"
        except Exception as error:
            # States that are damaged with right digests meet whatever takes them.
            strict = DOORS[name][2] in ("files", "settings", "predictions")
            outcome = f"{type(error).__name__}: {error}"[:300] if strict else ""
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"[:300]
        on.clear()
        signal.alarm(0)
        times[file] = time.monotonic() - began
        happened[file] = (outcome, list(dict.fromkeys(seen))[:5])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    return happened, times, grown, hostile_files.PAYLOAD in sys.modules


# Harmless: a file whose weights are good and whose other parts were left out, or are good under another name.
MAY_LOAD = re.compile(
    r"good|keys|^ours-|^lightning-|pickle-(itself|many)|settings-(digits|laughs|literal|code|empty|name)"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    marker = str(folder / "marker")
    made = {"files": hostile_files.corpus(folder, marker), "settings": hostile_files.settings(folder, marker)}
    (folder / "settings-good.yaml").write_text("width: 2\n")
    for kind, make in {"state": lambda place: accelerator().save_state(place / "whole"), "run": make_run}.items():
        for name in (kind, f"{kind}-forged", f"{kind}-more"):
            (folder / name).mkdir()
        made[kind] = hostile_files.of_ours(make(folder / kind), folder / f"{kind}-forged", marker)
    more = hostile_files.of_ours(folder / "state" / "whole", folder / "state-more", marker)
    made["projects"] = hostile_files.projects(more, folder / "state-more")
    (folder / "predictions").mkdir()
    (folder / "predictions-more").mkdir()
    whole = make_predictions(folder / "predictions")
    made["predictions"] = hostile_files.predictions(whole, folder / "predictions-more", marker)
    (folder / "project" / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder / "state" / "whole", folder / "project" / "checkpoints" / "checkpoint_0")
    (folder / "good-folder").mkdir()
    shutil.copytree(folder / "run" / "whole", folder / "good-folder" / "epoch=0-step=2.ckpt")
    hostile_files.of_ours(folder / "run" / "whole", folder / "run-more", marker)
    made["folders"] = {"all": folder / "run-more", "hub": made["files"]["hub-bin"], "dcp": made["files"]["dcp"]}
    return folder, marker, made


def chosen(name, made):
    """What to try on a door: what was made for it, and a part of the rest that the door's name decides."""
    kind = DOORS[name][2]
    rest = made["files"] if kind in ("files", "state", "run", "predictions") else {}
    rest = rest | (made["state"] if kind == "files" else {})
    if name == "load_weights(source)":
        return rest
    some = random.Random(name).sample(sorted(rest), min(50, len(rest)))
    if name.startswith("TaskModule"):
        some += [file for file in rest if file.startswith("lightning")]
    return (made[kind] if kind != "files" else {}) | {file: rest[file] for file in some}


def check(name, folder, marker, tried, megabytes=MEGABYTES):
    _, good, kind = DOORS[name]
    good = folder / kind / good if good == "whole" else folder / good
    happened, times, grown, imported = run(attack, 1, name, str(folder), good, tried, timeout=280)[0]
    assert not Path(marker).exists()
    assert not imported
    assert {file: seen for file, (_, seen) in happened.items() if seen} == {}
    assert {f: what for f, (what, _) in happened.items() if what not in ("", "loaded")} == {}
    if kind in ("files", "settings"):
        loaded = {f for f, (what, _) in happened.items() if what == "loaded"}
        assert {f for f in loaded if not MAY_LOAD.search(f)} == set()
    assert {f: spent for f, spent in times.items() if spent > SECONDS} == {}
    assert grown < megabytes, grown


# What these do with a path the others do too.
ALIKE = {
    *("Trainer.validate(ckpt_path)", "Trainer.test(ckpt_path)", "Trainer.predict(ckpt_path)"),
    *("load_checkpoint_and_dispatch(checkpoint)", "dispatch_model(offload_dir)"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in DOORS]
)
def test_no_file_does_harm(name, files):
    folder, marker, made = files
    check(name, folder, marker, chosen(name, made))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DOORS if DOORS[name][2] in ("files", "state", "run")])
def test_no_file_at_all_does_harm(name, files, tmp_path):
    folder, marker, made = files
    many = {f"{keys}-keys": hostile_files.headers(keys)["keys"] for keys in (150_000, 1_000_000)}
    for file, content in many.items():
        (tmp_path / file).write_bytes(content)
    everything = made["files"] | made["state"] | made["run"] | {file: tmp_path / file for file in many}
    # safetensors' own parser takes 15 times the memory of a header of a million tensors.
    check(name, folder, marker, everything, 2 * MEGABYTES)
