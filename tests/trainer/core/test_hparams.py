"""`hparams` holds what was passed; checkpoints and loggers get what of it is data; the constructor gets that back."""

import dataclasses
import enum
import functools
import gc
import sys
import threading
import warnings
from argparse import Namespace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from support.callback_runs import Rows
from support.models import Count, Line, loader
from support.trainers import make_trainer, says
from torch import nn
from treadle.compat.plugins.io import TorchCheckpointIO
from treadle.engine.checkpoint.json_codec import Record
from treadle.trainer.core.hparams import CannotRebuild, rebuild

import treadle


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass
class Layer:
    width: int
    mode: Mode = Mode.FAST


@dataclasses.dataclass
class Wide(Layer):
    times: int = 2


class Kept(Line):
    def __init__(self, value, other=None):
        super().__init__()
        self.save_hyperparameters()


class KeptData(treadle.DataModule):
    def __init__(self, value, other=None):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader()


def fitted(task, root, datamodule=None, **flags):
    """Train a little and save; returns the checkpoint."""
    trainer = make_trainer(**flags)
    trainer.fit(task, datamodule or loader())
    trainer.save_checkpoint(root / "c")
    return root / "c"


def in_another_process(cls, path, **arguments):
    """Load as a process does that does not have the task."""
    gc.collect()
    return cls.load_from_checkpoint(path, **arguments)


def said_of_hparams(caught):
    return [str(one.message) for one in caught if "hparams" in str(one.message)]


def config():
    text = """
    model: {lr: 0.1, layers: [8, 4], name: 'net-${seed}', literal: '\\${seed}'}
    again: ${model.layers}
    seed: 7
    later: ???
    nothing: null
    """
    return OmegaConf.create(text)


# -- what the user has ---------------------------------------------------------------------------------------------


class Hydra(Line):
    """As the template of Hydra projects has it."""

    def __init__(self, net, optimizer, cfg, scheduler=None, compile=False):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = self.hparams.net

    def configure_optimizers(self):
        return self.hparams.optimizer(params=self.parameters(), lr=self.hparams.cfg.model.lr)


def test_what_can_not_be_stored_is_said_once_and_has_to_be_passed(tmp_path):
    net, optimizer = nn.Linear(2, 1), functools.partial(torch.optim.SGD, momentum=0.9)
    task = Hydra(net, optimizer, config())
    hparams = task.hparams
    assert list(hparams) == ["net", "optimizer", "cfg", "scheduler", "compile"]
    assert (hparams.net, hparams.optimizer) == (net, optimizer)
    assert (hparams.cfg.model.lr, hparams.cfg.model.name) == (0.1, "net-7")
    assert dict(task.named_parameters()).keys() == {"net.weight", "net.bias"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = fitted(task, tmp_path, enable_checkpointing=True, default_root_dir=tmp_path)
    del task, hparams
    (said,) = said_of_hparams(caught)
    assert said.startswith("Hydra.hparams: checkpoints cannot store net (Linear), optimizer (partial). Pass net=..., ")
    with says(TypeError, "does not contain net (Linear), optimizer (partial), which Hydra needs. Pass"):
        in_another_process(Hydra, path)
    other = nn.Linear(2, 1)
    again = Hydra.load_from_checkpoint(path, net=other, optimizer=optimizer)
    assert again.net is other
    assert torch.equal(other.weight, net.weight)
    assert isinstance(again.hparams.cfg, DictConfig)
    assert OmegaConf.to_container(again.hparams.cfg, resolve=True) == OmegaConf.to_container(config(), resolve=True)


def test_a_default_that_is_no_data_is_not_missed(tmp_path, recwarn):
    class Default(Line):
        def __init__(self, activation=torch.relu, width=3):
            super().__init__()
            self.save_hyperparameters()

    path = fitted(Default(width=4), tmp_path)
    again = Default.load_from_checkpoint(path)
    assert (again.hparams.activation, again.hparams.width) == (torch.relu, 4)
    assert said_of_hparams(recwarn) == []

    path = fitted(Default(torch.tanh), tmp_path / "b")
    with pytest.warns(UserWarning, match=r"does not contain activation \(builtin.*; Default uses its default"):
        assert in_another_process(Default, path).hparams.activation is torch.relu


def test_a_dict_that_can_be_stored_in_part_is_logged_in_part_and_passed_whole(tmp_path):
    logger = treadle.loggers.CSVLogger(tmp_path, "logs", 0)
    with pytest.warns(UserWarning, match=r"cannot store value\.activation \(class Layer\)"):
        path = fitted(Kept({"width": 3, "activation": Layer}), tmp_path, logger=logger)
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {"value": {"width": 3}, "other": None}
    with pytest.raises(TypeError, match=r"does not contain value\.activation \(class Layer\), which Kept needs"):
        in_another_process(Kept, path)


# -- what comes back -----------------------------------------------------------------------------------------------


FEW, RATE = Layer(1), np.float32(0.1)


class Typed(Line):
    def __init__(
        self,
        mode: Mode,
        layer: Layer,
        layers: "list[Layer] | None" = None,
        where: Path = Path(),
        when: date | None = None,
        rate=RATE,
        modes=None,
        extra=FEW,
    ):
        super().__init__()
        self.save_hyperparameters()


TYPED = {
    "mode": Mode.EXACT,
    "layer": Wide(3, Mode.EXACT, times=5),
    "layers": [Layer(1), Wide(2)],
    "where": Path("a/b"),
    "when": date(2026, 2, 3),
    "rate": np.float32(0.7),
    "modes": {Mode.FAST: [Mode.EXACT]},
    "extra": Layer(9, Mode.EXACT),
}


def test_enums_dataclasses_dates_and_paths_come_back(tmp_path, recwarn):
    again = Typed.load_from_checkpoint(fitted(Typed(**TYPED), tmp_path))
    assert again.hparams == TYPED
    assert {name: type(value) for name, value in again.hparams.items()} == {n: type(v) for n, v in TYPED.items()}
    assert [str(one.message) for one in recwarn if "hparams" in str(one.message) or "hold" in str(one.message)] == []


def test_they_are_logged_as_plain_data_and_come_back_from_that_too(tmp_path):
    logger = treadle.loggers.CSVLogger(tmp_path, "logs", 0)
    path = fitted(Typed(**TYPED), tmp_path, logger=logger)
    written = Path(logger.log_dir, "hparams.yaml")
    found = yaml.safe_load(written.read_text())
    assert found["layer"] == {"width": 3, "mode": "Mode.EXACT", "times": 5}
    assert (found["mode"], found["where"], found["when"]) == ("Mode.EXACT", "a/b", "2026-02-03")
    found["layer"].pop("times")  # the annotation says which class it is, and that has none
    written.write_text(yaml.safe_dump({**found, "layers": None}))
    again = Typed.load_from_checkpoint(path, hparams_file=written)
    assert (again.hparams.mode, again.hparams.where, again.hparams.when) == (Mode.EXACT, Path("a/b"), date(2026, 2, 3))
    assert again.hparams.layer == Layer(3, Mode.EXACT)


def test_a_dataclass_that_no_annotation_names_is_not_built(tmp_path):
    with pytest.warns(UserWarning, match=r"cannot store value \(a Layer, but the argument is not annotated"):
        path = fitted(Kept(Layer(2), Mode.EXACT), tmp_path)
    with pytest.raises(TypeError, match=r"value \(a Layer, but the argument is not annotated.*load_from_checkpoint"):
        in_another_process(Kept, path)
    assert Kept.load_from_checkpoint(path, value=Layer(2)).hparams.other is Mode.EXACT


@dataclasses.dataclass
class Runs:
    """What a hostile checkpoint would like to build."""

    command: str
    built = 0

    def __post_init__(self):
        Runs.built += 1


def test_a_checkpoint_does_not_choose_what_is_built(tmp_path):
    for name in (f"{__name__}:Runs", "subprocess:Popen", "antigravity:x"):
        for kind in ("dataclass", "enum", "mapping", "DictConfig", "other"):
            record = Record(kind, name, {"command": "x"} if kind != "enum" else "RED")
            for annotation in (Layer, object, list[Layer], None):
                try:
                    found = rebuild(record, annotation, None, __name__)
                except CannotRebuild:
                    continue
                assert kind in ("mapping", "DictConfig")
                assert found == {"command": "x"}
    assert Runs.built == 0
    assert "antigravity" not in sys.modules


def test_no_text_of_a_checkpoint_is_a_reference(tmp_path):
    """`OmegaConf.register_new_resolver("eval", eval)` is common, and would run what a checkpoint says."""
    seen = []
    OmegaConf.register_new_resolver("treadle_test", lambda text: seen.append(text) or "run", replace=True)
    hostile = ["${treadle_test:x}", "\\${treadle_test:x}", "\\\\${treadle_test:x}", "a${treadle_test:${b}}"]
    found = rebuild(Record("DictConfig", "", {"a": hostile, "b": hostile[0]}), None, None, __name__)
    assert (list(found.a), found.b) == (hostile, hostile[0])
    assert seen == []


# -- one argument that holds them all ------------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    layer: Layer = dataclasses.field(default_factory=lambda: Layer(1))
    net: nn.Module | None = None


class Whole(Line):
    def __init__(self, settings: Settings | None):
        super().__init__()
        self.save_hyperparameters(settings)
        self.settings = settings


@pytest.mark.parametrize(
    "whole",
    [
        {"lr": 0.3, "layer": {"width": 2}},
        Namespace(lr=0.3, layer=Namespace(width=2)),
        OmegaConf.create({"lr": 0.3, "layer": {"width": 2}, "twice": "${lr}"}),
        Settings(0.3, Layer(2, Mode.EXACT)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_comes_back_as_what_it_was(tmp_path, whole):
    path = fitted(Whole(whole), tmp_path)
    again = Whole.load_from_checkpoint(path)
    assert again.hparams["lr"] == 0.3
    assert again.settings == whole
    assert again.settings.lr == 0.3
    if not isinstance(whole, dict):  # which comes back with attributes
        assert type(again.settings) is type(whole)
        assert again.settings.layer.width == 2
    assert Whole.load_from_checkpoint(path, lr=0.5).hparams["lr"] == 0.5


def test_an_omegaconf_dict_stays_one():
    cfg = config()
    OmegaConf.set_struct(cfg, True)
    task = Whole(cfg)
    assert isinstance(task.hparams, DictConfig)
    assert (task.hparams.model.lr, task.hparams.model.name) == (0.1, "net-7")
    assert isinstance(task.hparams.again, ListConfig)
    cfg.model.lr = 5.0
    assert task.hparams.model.lr == 0.1

    class More(Whole):
        def __init__(self, settings, net):
            super().__init__(settings)
            self.save_hyperparameters("net")

    net = nn.Linear(1, 1)
    more = More(config(), net).hparams
    assert (more.net, more.model.lr) == (net, 0.1)


def test_what_it_lacks_can_be_passed(tmp_path):
    net = nn.Linear(1, 1)
    path = fitted(Whole({"net": net, "lr": 0.3}), tmp_path)
    with pytest.warns(UserWarning, match=r"settings lacks net \(Linear\), which cannot be stored\. Pass net=\.\.\."):
        assert in_another_process(Whole, path).settings == {"lr": 0.3}
    assert Whole.load_from_checkpoint(path, net=net).settings == {"lr": 0.3, "net": net}
    path = fitted(Whole({object: 1, "lr": 0.3, "nested": {object: 2, "depth": 4}}), tmp_path)  # as keys that cannot be
    with pytest.warns(UserWarning, match="cannot be stored"):
        assert in_another_process(Whole, path).settings == {"lr": 0.3, "nested": {"depth": 4}}


def test_classes_of_torch_are_stored_by_name(tmp_path):
    """Libraries of forecasts take classes as arguments; their own ones are not stored."""
    given = {"value": torch.optim.Adam, "other": [nn.Tanh, nn.Identity]}
    path = fitted(Kept(**given), tmp_path)
    assert in_another_process(Kept, path).hparams == given
    with pytest.warns(UserWarning, match="other.*class HasObjects"):
        fitted(Kept(1, HasObjects), tmp_path)


@pytest.mark.parametrize(
    "name",
    ["torch.optim.adam:Adamant", "torch.nn.functional:relu", "torch.hub:load", f"{__name__}:Kept", "os:x", ""],
)
def test_a_file_names_no_other_class(name):
    with pytest.raises(CannotRebuild, match="does not have"):
        rebuild(Record("class", name, None), type, None, __name__)


class HasObjects(Line):
    """A library's model: its loss is among the arguments of arguments, and its hooks save an object."""

    def __init__(self, arguments, layer=None, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.loss, self.metric = arguments["loss"], nn.L1Loss()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["metric"], checkpoint["words"] = self.metric, ["a"]

    def on_load_checkpoint(self, checkpoint):
        self.metric, self.words = checkpoint["metric"], checkpoint["words"]


class Pickles(TorchCheckpointIO):
    """A plugin that is the user's."""


@pytest.mark.parametrize("plugins", [[], [Pickles()]], ids=["file", "plugin"])
def test_objects_come_back_as_copies_as_long_as_the_task_exists(tmp_path, plugins):
    loss, scale = nn.SmoothL1Loss(beta=0.3), torch.Tensor.mul
    task, data = HasObjects({"loss": loss, "size": 3}, Layer(4)), KeptData(scale)
    task.metric.seen = task.net.weight.sum()  # as a metric's state, which deepcopy refuses
    with pytest.warns(UserWarning, match=r"adds metric \(L1Loss\), which checkpoints cannot store"):
        path = fitted(task, tmp_path, datamodule=data, plugins=plugins)
    again = HasObjects.load_from_checkpoint(path, width=7)
    assert (again.loss.beta, again.hparams.arguments["size"], again.hparams.width, again.words) == (0.3, 3, 7, ["a"])
    assert type(again.metric) is nn.L1Loss
    assert again.metric.seen.item() == task.metric.seen.item()
    assert not {again.loss, again.metric} & {task.loss, task.metric}
    assert torch.equal(again.net.weight, task.net.weight)
    assert plugins or again.hparams.layer == Layer(4)
    assert plugins or KeptData.load_from_checkpoint(path).hparams.value is scale
    resumed = HasObjects({"loss": loss}, Layer(4))
    make_trainer(max_epochs=2, plugins=plugins).fit(resumed, loader(), ckpt_path=path)
    assert resumed.metric is not task.metric
    assert type(resumed.metric) is nn.L1Loss
    del task, data, again, resumed
    with pytest.warns(UserWarning, match=r"metric \(L1Loss\), which on_save_checkpoint added, .* This task's are used"):
        again = in_another_process(HasObjects, path, arguments={"loss": loss}, layer=None)
    assert (type(again.metric), again.words) == (nn.L1Loss, ["a"])
    fix = r"added metric \(L1Loss\), which .* Pass the hyperparameters that it lacks to load_from_checkpoint"
    with pytest.warns(UserWarning, match="uses its default"), pytest.raises(KeyError, match=fix):
        in_another_process(HasObjects, path, arguments={"loss": loss})
    resumed = HasObjects({"loss": loss}, Layer(4))
    metric = resumed.metric
    with pytest.warns(UserWarning, match=r"metric \(L1Loss\), .* stores only data\. This task's are used"):
        make_trainer(max_epochs=2, plugins=plugins).fit(resumed, loader(), ckpt_path=path)
    assert (resumed.metric, resumed.words) == (metric, ["a"])


def test_the_hooks_of_a_task_that_was_connected_after_another_are_called(tmp_path):
    """A library may save a model that it has not trained, such as one that needs no training."""
    trainer = make_trainer()
    for task in (HasObjects({"loss": nn.L1Loss()}), HasObjects({"loss": nn.MSELoss()})):
        trainer.strategy.connect(task)
        trainer.save_checkpoint(tmp_path / "c")
        again = HasObjects.load_from_checkpoint(tmp_path / "c")
        assert (type(again.loss), again.words) == (type(task.loss), ["a"])
        assert torch.equal(again.net.weight, task.net.weight)
        trainer.fit(HasObjects({"loss": nn.L1Loss()}), loader())


def test_an_object_that_cannot_be_copied_has_to_be_passed(tmp_path):
    task = Kept(threading.Lock())
    path = fitted(task, tmp_path)
    with pytest.raises(TypeError, match=r"value \(lock\), which cannot be copied: .*lock.*Pass value="):
        Kept.load_from_checkpoint(path)
    assert Kept.load_from_checkpoint(path, value=None).hparams.value is None


# -- copies --------------------------------------------------------------------------------------------------------


def test_later_changes_of_what_was_passed_are_not_saved(tmp_path):
    class Lists(Line):
        def __init__(self, layers, cfg):
            super().__init__()
            self.save_hyperparameters()
            layers.append(99)
            cfg.seed = 99

    task = Lists([1, 2], config())
    assert (task.hparams.layers, task.hparams.cfg.seed) == ([1, 2], 7)
    task.hparams.layers.append(3)
    task.hparams.rate = 0.5
    assert task.hparams_initial.layers == [1, 2]
    assert "rate" not in task.hparams_initial
    again = Lists.load_from_checkpoint(fitted(task, tmp_path / "a"))
    assert again.hparams.layers == [1, 2, 3]


# -- where they are found ------------------------------------------------------------------------------------------


def test_save_hyperparameters_in_a_helper_of_init():
    class Helped(Line):
        def __init__(self, width):
            super().__init__()
            self._keep_all()

        def _keep_all(self):
            self.save_hyperparameters()

    assert Helped(3).hparams == {"width": 3}
    with pytest.raises(ValueError, match=r"called outside of Helped\.__init__"):
        Helped(3)._keep_all()


def test_an_extension_ignores_what_its_base_has_kept():
    class Base(Line):
        def __init__(self, net, width=1):
            super().__init__()
            self.save_hyperparameters()

    class Extension(Base):
        def __init__(self, net, width=1):
            super().__init__(net, width)
            self.save_hyperparameters(ignore="net")

    assert Extension(nn.Linear(1, 1), 2).hparams == {"width": 2}
    task = Line()
    task.save_hyperparameters(config(), ignore=["model", "again"])
    assert set(task.hparams) == {"seed", "later", "nothing"}


# -- loggers -------------------------------------------------------------------------------------------------------


def logged(task, data, **flags):
    logger, calls = Rows(), []
    logger.log_hyperparams = lambda params, metrics=None: calls.append(params)
    make_trainer(logger=logger, **flags).fit(task, datamodule=data)
    return calls


def test_a_task_and_its_data_module_are_logged_together():
    calls = logged(Kept(2, config()), KeptData(2, config()))
    assert calls == [{"value": 2, "other": OmegaConf.to_container(config(), resolve=True)}]
    assert logged(Kept(4), KeptData(2), enable_autolog_hparams=False) == []
    with pytest.raises(ValueError, match=r"'value': Kept has 4 and KeptData has 2, but loggers store one value"):
        logged(Kept(4), KeptData(2))


def test_an_optimizer_made_of_a_configuration_is_saved_and_resumed(tmp_path):
    """Hydra passes its own lists on: `torch.optim.AdamW(betas=ListConfig)`, a group's `betas`, a callback's state."""
    settings = OmegaConf.create({"betas": [0.8, 0.9], "tags": {"name": "head"}})

    class Configured(Line):
        def configure_optimizers(self):
            group = {"params": self.parameters(), "betas": settings.betas, "tags": settings.tags}
            return torch.optim.AdamW([group], lr=0.1)

    class Stateful(Count, treadle.Callback):
        pass

    path = fitted(Configured(), tmp_path, callbacks=Stateful(settings))
    callback = Stateful()
    trainer = make_trainer(max_epochs=2, callbacks=[callback])
    trainer.fit(Configured(), loader(), ckpt_path=path)
    assert trainer.global_step == 4
    assert trainer.optimizers[0].param_groups[0]["betas"] == [0.8, 0.9]
    assert type(callback.value) is dict
    assert callback.value == {"betas": [0.8, 0.9], "tags": {"name": "head"}}


def test_a_child_saves_its_own_arguments():
    class Parent(treadle.TaskModule):
        def __init__(self, depth=2, width=5):
            super().__init__()
            self.child = Kept(width)
            self.save_hyperparameters()

    parent = Parent(depth=4)
    assert dict(parent.child.hparams) == {"value": 5, "other": None}
    assert dict(parent.hparams) == {"depth": 4, "width": 5}


def test_a_value_changed_before_fit_is_logged_and_saved(tmp_path):
    task = Kept(0.1)
    task.hparams.value = 0.5
    logger = treadle.loggers.CSVLogger(tmp_path)
    path = fitted(task, tmp_path, logger=logger)
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {"value": 0.5, "other": None}
    assert Kept.load_from_checkpoint(path).hparams.value == 0.5
    assert task.hparams_initial["value"] == 0.1
