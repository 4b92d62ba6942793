"""Which methods are called as hooks, with which arguments, and which ones are only warned of."""

from unittest.mock import Mock

import pytest
import torch
from support.models import Line, loader
from support.trainers import make_trainer, says
from torch import nn
from treadle.callbacks import LambdaCallback

import treadle


class Task(Line):
    def __init__(self):
        super().__init__()
        self.calls = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.net(batch[0]).mean()

    test_step = validation_step

    def forward(self, batch):
        return self.net(batch[0])


class Short(treadle.Callback):
    """A hook of evaluation batches as it was written while there was one loader."""

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.calls.append(("validation start", batch_idx))


def test_hooks_of_evaluation_batches_may_leave_out_the_loaders_index():
    task = Task()
    note = task.calls.append
    task.on_validation_batch_end = lambda outputs, batch, index: note(("validation end", outputs.shape, index))
    task.on_test_batch_start = lambda batch, index: note(("test", index))
    task.on_predict_batch_start = lambda *arguments: note(("predict", *arguments[1:]))
    last = LambdaCallback(on_predict_batch_end=lambda one, task, out, batch, index: note(("predict end", index)))
    run = make_trainer(callbacks=[Short(), last], num_sanity_val_steps=0)
    run.fit(task, loader(), loader())
    run.test(task, loader(), verbose=False)
    run.predict(task, loader())
    pairs = ((("validation start",), ("validation end", ())), (("test",),), (("predict",), ("predict end",)))
    assert task.calls == [(*call, index) for calls in pairs for index in (0, 1) for call in calls]


def test_several_loaders_need_the_index():
    with says(ValueError, "Short.on_validation_batch_start has no argument dataloader_idx", "there are 2 dataloaders"):
        make_trainer(callbacks=Short(), num_sanity_val_steps=0).fit(Task(), loader(), [loader(), loader()])


def never(self, *arguments):
    raise AssertionError("called after all")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("on_training_epoch_end", "Did you mean 'on_train_epoch_end'"),
        ("on_train_batch_ends", "Did you mean 'on_train_batch_end'"),
        ("on_epoch_end", "use on_train_epoch_end"),
        ("training_step_end", "move its code to the end of training_step"),
        ("on_epoch_finish", "Did you mean 'on_train_epoch_end'"),
        ("on_val_begin", "Did you mean 'on_validation_start'"),
    ],
)
@pytest.mark.parametrize("of_task", [True, False], ids=["task", "callback"])
def test_a_method_that_nearly_is_a_hook_is_warned_of(name, advice, of_task, recwarn):
    odd = type("Odd", (Task if of_task else treadle.Callback,), {name: never})()
    make_trainer(callbacks=None if of_task else odd).fit(odd if of_task else Task(), loader(), loader())
    messages = [str(warning.message) for warning in recwarn]
    assert [message for message in messages if f"Odd.{name} is " in message and advice in message], messages


def test_a_method_with_a_name_of_its_own_is_not_warned_of(recwarn):
    odd = type("Odd", (Task,), {"on_disk": never, "training_step_end": None})()
    make_trainer().fit(odd, loader(), loader())
    assert not [warning for warning in recwarn if "Odd" in str(warning.message)]


def test_none_disables_a_hook():
    task = type("Hooked", (Task,), {"on_train_epoch_end": never, "on_validation_epoch_end": never})()
    task.on_train_epoch_end = task.on_validation_epoch_end = None
    make_trainer().fit(task, loader(), loader())
    assert task.trainer.global_step == 2


class OwnModes(Task):
    """Batch norm stays in training mode while validating, and is frozen after the first epoch; chemprop and scvi-tools
    do such things."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.modes = []

    def validation_step(self, batch, batch_idx):
        self.modes.append((self.net.training, self.norm.training))

    def on_validation_model_zero_grad(self):
        self.modes.append("zero_grad")

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.norm.train()

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.norm.eval()

    def training_step(self, batch, batch_idx):
        self.modes.append(("step", self.net.training, self.norm.training))
        return self.net(batch[0]).mean()


def test_a_task_may_set_the_modes_of_evaluation():
    task = OwnModes()
    make_trainer(max_epochs=2, num_sanity_val_steps=0).fit(task, loader(2), loader(2))
    once = ["zero_grad", (False, True)]
    assert task.modes == [("step", True, True), *once, ("step", True, False), *once]
    task.modes.clear()
    make_trainer().validate(task, loader(2), verbose=False)
    assert task.modes == [(False, True)]


def test_modes_are_taken_back_when_an_evaluation_fails():
    task = OwnModes()
    task.validation_step = Mock(side_effect=RuntimeError)
    task.net.eval()
    with pytest.raises(RuntimeError):
        make_trainer().validate(task, loader(2), verbose=False)
    assert (task.training, task.net.training, task.norm.training) == (True, False, True)


def with_star_arguments(base, names, seen):
    """Return a subclass of ``base`` whose methods take ``*args, **kwargs``, note what they got, and pass it on."""

    def build(name):
        def method(self, *args, **kwargs):
            seen.add((base.__name__, name, len(args), *sorted(kwargs)))
            return getattr(super(subclass, self), name)(*args, **kwargs)

        return method

    subclass = type("Star", (base,), {name: build(name) for name in names})
    return subclass


class Data(treadle.DataModule):
    def __init__(self, loaders):
        super().__init__()
        self.train_dataloader = loader
        evaluation = loader if loaders == 1 else lambda: [loader() for _ in range(loaders)]
        self.val_dataloader = self.test_dataloader = self.predict_dataloader = evaluation


BATCH_HOOKS = [f"on_{kind}_batch_{moment}" for kind in ("validation", "test", "predict") for moment in ("start", "end")]
STEPS = ["validation_step", "test_step", "predict_step"]
TRAINING = {"training_step": 2, "on_train_batch_start": 2, "on_train_batch_end": 3, "on_before_optimizer_step": 1}
OF_TASK = {"backward": 1, "optimizer_step": 4, "optimizer_zero_grad": 3, "lr_scheduler_step": 2}
OF_TRANSFER = {"on_before_batch_transfer": 2, "transfer_batch_to_device": 3, "on_after_batch_transfer": 2}


@pytest.mark.parametrize("loaders", [1, 2])
def test_star_arguments_get_the_arguments_that_lightning_passes(loaders):
    # Lightning 2.6 passes the index of the dataloader only with several; the counts were measured with it.
    class Plain(Task):
        predict_step = Task.validation_step

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    seen, shared = set(), [*BATCH_HOOKS, "setup", "teardown", *TRAINING]
    shared.remove("training_step")
    task_names = [*shared, *STEPS, *OF_TASK, "training_step", "configure_gradient_clipping"]
    task = with_star_arguments(Plain, task_names, seen)()
    callback = with_star_arguments(treadle.Callback, shared, seen)()
    data = with_star_arguments(Data, ["setup", "teardown", *OF_TRANSFER], seen)(loaders)
    run = make_trainer(callbacks=callback, num_sanity_val_steps=0, max_epochs=1, gradient_clip_val=1.0)
    for stage in (run.fit, run.validate, run.test, run.predict):
        stage(task, datamodule=data)
    expected = {("Plain", name, 1 + loaders) for name in STEPS}
    for owner, bound in (("Plain", 0), ("Callback", 2)):
        expected |= {(owner, name, bound + loaders + 1 + name.endswith("end")) for name in BATCH_HOOKS}
        expected |= {(owner, name, bound, "stage") for name in ("setup", "teardown")}
        expected |= {(owner, name, bound + count) for name, count in TRAINING.items() if name in shared}
    expected |= {("Plain", name, count) for name, count in OF_TASK.items()} | {("Plain", "training_step", 2)}
    expected |= {("Plain", "configure_gradient_clipping", 1, "gradient_clip_algorithm", "gradient_clip_val")}
    expected |= {("Data", name, count) for name, count in OF_TRANSFER.items()}
    expected |= {("Data", name, 0, "stage") for name in ("setup", "teardown")}
    assert seen == expected


def test_hooks_may_mix_names_and_star_arguments_or_use_names_of_their_own():
    task, run = Task(), make_trainer(num_sanity_val_steps=0, max_steps=1, gradient_clip_val=1.0)
    note = task.calls.append
    task.setup = lambda which: note(which)
    task.teardown = lambda *, stage: note(stage)
    task.validation_step = lambda batch, *rest: note(rest)
    task.test_step = lambda batch, batch_idx, dataloader_idx, *rest: note((batch_idx, dataloader_idx, rest))
    task.configure_gradient_clipping = lambda optimizer, limit, kind: note((limit, kind))
    run.validate(task, loader(2), verbose=False)
    run.test(task, loader(2), verbose=False)
    run.fit(task, loader(2))
    assert task.calls == [
        *("validate", (0,), "validate"),
        *("test", (0, 0, ()), "test"),
        *("fit", (1.0, None), "fit"),
    ]
