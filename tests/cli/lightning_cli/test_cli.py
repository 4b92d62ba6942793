"""`LightningCLI` runs the programs that were written for Lightning's, with the same settings and the same numbers."""

import sys

import pytest
import torch
from lightning_cli_samples import Data, DeepEncoder, Encoder, Factories, Model, Options, build_model
from support.lightning_cli_runs import DEFAULTS, build, execute
from support.trainers import NO_OUTPUT
from treadle.callbacks import EarlyStopping, ModelCheckpoint, Timer
from treadle.cli import LightningArgumentParser, LightningCLI
from treadle.engine.preemption import SLURMEnvironment

import treadle

MODEL = "lightning_cli_samples.Model"
SAVING = {**DEFAULTS, "enable_checkpointing": True, "default_root_dir": "."}


class WithOptimizer(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.num_classes", "model.batch_size", apply_on="instantiate")
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
        parser.set_defaults({"optimizer.lr": 0.02, "lr_scheduler.gamma": 0.5})


PLATEAU = "--lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=val_loss --lr_scheduler.patience=0"
STEP = "--lr_scheduler=StepLR --lr_scheduler.step_size=1"
MODEL_STEP = "--model.schedule=StepLR --model.schedule.step_size=1"
FACTORIES = {"model": Factories}
# Training and validation loss as lightning 2.6.6 with jsonargparse 4.53 has them.
RECORDED = {
    "plain": ("", {}, 3.337524, 3.149636),
    "seed": ("--seed_everything=42 --data.batch_size 4 --model.lr=0.1", {}, 0.122685, 0.06684),
    "optimizer": (f"--optimizer=AdamW --optimizer.lr=0.05 {STEP}", {}, 3.838989, 3.735188),
    "plateau": (f"--optimizer=Adam --optimizer.lr=0.05 --optimizer=SGD {PLATEAU}", {}, 1.862486, 1.638313),
    "fixed classes": ("--optimizer.weight_decay=0.1", {"cli": WithOptimizer}, 4.353494, 4.237226),
    "callables": (f"--model.optimizer=SGD --model.optimizer.lr=0.05 {MODEL_STEP}", FACTORIES, 2.577256, 2.630258),
    "callables' defaults": ("--model.optimizer.lr=0.05", FACTORIES, 3.718862, 3.459186),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("optimizer", "callables") else pytest.mark.exhaustive)
        for case in RECORDED
    ],
)
@pytest.mark.filterwarnings("ignore:.*will be overridden by")
def test_metrics_are_the_peers(case):
    words, classes, train_loss, val_loss = RECORDED[case]
    done = execute("fit", *words.split(), **classes)
    metrics = {name: value.item() for name, value in done.trainer.callback_metrics.items()}
    assert metrics == pytest.approx({"train_loss": train_loss, "val_loss": val_loss}, rel=1e-5)


def test_the_subcommand_is_run_and_everything_is_at_hand():
    cli = execute("fit", "--trainer.max_epochs=1", "--model.sizes=[20,10]", "--data.batch_size", "4")
    assert cli.subcommand == "fit"
    assert cli.trainer.current_epoch == cli.trainer.max_epochs == 1
    read = (cli.config.fit.model.sizes, cli.config["fit"]["model"]["sizes"], cli.config["fit.model.sizes"])
    assert [*read, cli.model.hparams.sizes] == [[20, 10]] * 4
    assert cli.datamodule.batch_size == 4
    assert cli.config_init.fit.model is cli.model
    assert cli.config_init["fit"].data is cli.datamodule
    assert cli.config.fit.seed_everything == 0
    assert isinstance(cli.parser, LightningArgumentParser)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "metrics"), [("validate", ["val_loss"]), ("test", ["test_loss"]), ("predict", [])])
def test_other_subcommands(stage, metrics):
    assert list(execute(stage).trainer.callback_metrics) == metrics


def test_without_a_subcommand_the_objects_are_built():
    cli = build("--trainer.max_epochs=1", "--model.lr=0.1")
    assert cli.subcommand is None
    assert cli.trainer.global_step == 0
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.global_step == 4
    assert cli.config.model.lr == 0.1


@pytest.mark.long
def test_a_class_named_on_the_command_line():
    words = (f"--model={MODEL}", "--model.lr=0.1", "--data.class_path=lightning_cli_samples.Data", "--data.samples=16")
    cli = build(*words, model=None, data=None)
    assert (type(cli.model), cli.model.hparams.lr, cli.datamodule.samples) == (Model, 0.1, 16)
    assert cli.config.model.class_path == MODEL
    assert cli.config.model.init_args.lr == 0.1
    words = (f"--model={MODEL}", "--data=lightning_cli_samples.Data")
    assert type(build(*words, subclass_mode_model=True, subclass_mode_data=True).model) is Model
    made = build("--model.lr=0.3", model=build_model).model  # by a function
    assert (type(made), made.hparams.lr) == (Model, 0.3)
    with pytest.raises(SystemExit) as ended:
        build(model=None)
    assert ended.value.code == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Alone has a validation_step")
def test_a_task_may_bring_its_own_data():
    class Alone(Model):
        train_dataloader = Data().train_dataloader

    assert execute("fit", model=Alone, data=None).trainer.global_step == 8


@pytest.mark.long
def test_settings_as_a_dict():
    cli = execute(args={"fit": {"model": {"lr": 0.1}, "trainer.max_epochs": 1}})
    assert (cli.model.hparams.lr, cli.trainer.max_epochs) == (0.1, 1)
    assert build(args={"model.lr": 0.2, "model": {"color": "BLUE"}}).model.hparams.color == "BLUE"


@pytest.mark.parametrize(("default", "seed"), [(True, 0), (123, 123), (False, False)])
def test_seeds(default, seed):
    state = torch.get_rng_state()
    cli = build(seed_everything_default=default)
    assert cli.config.seed_everything == seed
    if default is not False:
        torch.manual_seed(seed)
        assert torch.equal(cli.model.net.weight, torch.nn.Linear(4, 2).weight)
    torch.set_rng_state(state)


def test_hooks_run_in_order_and_settings_may_be_changed_first():
    class Hooked(LightningCLI):
        def before_instantiate_classes(self):
            assert not hasattr(self, "model")
            self.config.fit.model.lr = 0.3
            self.config["fit"]["trainer"]["max_epochs"] = 1

        def after_instantiate_classes(self):
            self.calls = (f"built {type(self.trainer).__name__}",)

        def before_fit(self):
            self.calls += (f"before {self.trainer.global_step}",)

        def after_fit(self):
            self.calls += (f"after {self.trainer.global_step}",)

    cli = execute("fit", cli=Hooked)
    assert cli.calls == ("built Trainer", "before 0", "after 4")
    assert cli.model.hparams.lr == 0.3


def test_a_method_named_as_the_subcommand_takes_its_place():
    class Own(LightningCLI):
        def fit(self, model, datamodule, **arguments):
            self.arguments = arguments

    cli = execute("fit", "--ckpt_path=last.ckpt", cli=Own)
    assert cli.arguments["ckpt_path"] == "last.ckpt"
    assert cli.trainer.global_step == 0


def test_links_and_further_arguments():
    class Links(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_argument("--factor", type=int, default=3, help="of the batch size")
            parser.add_argument("--tags", nargs="+", default=["a"])
            parser.add_argument("--verbose", action="store_true")
            parser.add_argument("--options", type=Options, default=Options(width=3))
            rate = {"compute_fn": lambda data: data.samples / 100, "apply_on": "instantiate"}
            parser.link_arguments("data", "model.lr", **rate)
            parser.link_arguments(("factor", "data.batch_size"), "model.batch_size", compute_fn=lambda a, b: a * b)

    words = ("--factor=5", "--verbose", "--options.bias=false", "--data.samples=16", "--tags", "b", "c")
    cli = build(*words, cli=Links)
    assert (cli.model.hparams.lr, cli.model.hparams.batch_size) == (0.16, 40)
    assert (cli.config.tags, cli.config.verbose, cli.config_init.options) == (["b", "c"], True, Options(3, False))
    assert "lr" not in cli.config.model


def test_an_object_of_one_group_goes_into_another():
    class Shared(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_subclass_arguments(Encoder, "encoder", required=True)
            parser.add_class_arguments(Options, "sizes.options")
            parser.link_arguments("encoder", "model.encoder", apply_on="instantiate")
            parser.link_arguments("sizes.options.width", "model.batch_size")

    words = ("--encoder=DeepEncoder", "--encoder.depth=4", "--encoder.width=5", "--sizes.options.width=9")
    cli = build(*words, cli=Shared)
    assert (cli.model.encoder.depth, cli.model.encoder.width, cli.model.hparams.batch_size) == (4, 5, 9)
    assert cli.config_init.encoder is cli.model.encoder


class Stored(Model):
    def __init__(self, encoder: Encoder, width: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = encoder


class Partly(Model):
    def __init__(self, encoder: Encoder, width: int = 3):
        super().__init__()
        self.hparams.clear()
        self.save_hyperparameters("width")
        self.width = width


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*will be overridden by")
def test_a_checkpoint_brings_the_objects_in_its_arguments():
    defaults = SAVING | {"max_epochs": 1}
    words = ("fit", "--model.encoder=DeepEncoder", "--model.encoder.depth=7", "--model.width=5", "--optimizer=SGD")
    cli = execute(*words, model=Stored, trainer_defaults=defaults)
    path = cli.trainer.checkpoint_callback.best_model_path
    assert cli.model.hparams.encoder["class_path"] == "lightning_cli_samples.DeepEncoder"
    loaded = Stored.load_from_checkpoint(path, width=6)
    assert (type(loaded.encoder), loaded.encoder.depth, loaded.hparams.width) == (DeepEncoder, 7, 6)
    encoder = Encoder()
    assert Stored.load_from_checkpoint(path, encoder=encoder).encoder is encoder
    named = execute("fit", f"--model={__name__}.Stored", *words[1:], model=None, trainer_defaults=defaults)
    path = named.trainer.checkpoint_callback.best_model_path
    assert type(treadle.TaskModule.load_from_checkpoint(path).encoder) is DeepEncoder
    tested = execute("test", f"--ckpt_path={path}", f"--model={MODEL}", model=None).model
    assert (type(tested), tested.encoder.depth) == (Stored, 7)
    partly = execute("fit", *words[1:], model=Partly, trainer_defaults=defaults)
    path = partly.trainer.checkpoint_callback.best_model_path
    assert execute("test", f"--ckpt_path={path}", "--model.encoder=Encoder", model=Partly).model.width == 5


def test_without_instantiators_the_arguments_are_saved():
    class Arguments(LightningCLI):
        def _add_instantiators(self):
            pass

    for way in ({"load_from_checkpoint_support": False}, {"cli": Arguments}):
        kept = build("--model.encoder=DeepEncoder", model=Stored, **way).model
        assert isinstance(kept.hparams.encoder, DeepEncoder)


def test_callbacks_from_everywhere():
    class Stopped(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_lightning_class_args(EarlyStopping, "early")
            parser.set_defaults({"early.monitor": "val_loss", "early.patience": 5})

    words = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val_loss", "--early.mode=max")
    words += ("--trainer.callbacks+=LambdaCallback", "--trainer.enable_checkpointing=true")
    cli = build(*words, cli=Stopped, trainer_defaults={**DEFAULTS, "callbacks": Timer()})
    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert sorted(kinds) == ["EarlyStopping", "LambdaCallback", "ModelCheckpoint", "Timer"]
    assert cli.trainer.early_stopping_callback.patience == 5
    assert cli.trainer.early_stopping_callback.mode == "max"
    assert cli.trainer.checkpoint_callback.monitor == "val_loss"


def test_a_class_path_of_lightning_means_ours(here):
    word = '--trainer.callbacks=[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}]'
    cli = build(word, "--trainer.enable_checkpointing=true")
    assert isinstance(cli.trainer.checkpoint_callback, ModelCheckpoint)
    (here / "lightning.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: pytorch_lightning.callbacks.ModelCheckpoint\n  model_registry: null\n"
        "model:\n  name: pytorch_lightning.Trainer\n"
    )
    cli = build("--config=lightning.yaml", "--trainer.enable_checkpointing=true")
    assert isinstance(cli.trainer.checkpoint_callback, ModelCheckpoint)
    assert cli.config.model.name == "pytorch_lightning.Trainer"


def test_trainers_of_ones_own():
    class Own(treadle.Trainer):
        def __init__(self, *args, note: int = 3, **kwargs):
            super().__init__(*args, **kwargs)
            self.note = note

    class Limited(LightningCLI):
        def instantiate_trainer(self, **kwargs):
            return super().instantiate_trainer(max_epochs=7, **kwargs)

    assert build(cli=Limited).trainer.max_epochs == 7
    cli = build("--trainer.note=5", trainer_class=Own, trainer_defaults={**DEFAULTS, "max_epochs": None})
    assert (cli.trainer.note, cli.trainer.max_epochs) == (5, None)
    again = cli.instantiate_trainer(max_epochs=7, callbacks=[Timer()])
    assert (again.max_epochs, cli.trainer.max_epochs, cli.config_init.trainer.max_epochs) == (7, None, None)
    assert [type(callback) for callback in again.callbacks] == [Timer]


def test_fit_trains_in_the_method_that_lightning_programs_patch():
    class Own(treadle.Trainer):
        def _fit_impl(self, *arguments):
            self.arguments = arguments
            super()._fit_impl(*arguments)

    cli = execute("fit", trainer_class=Own)
    assert cli.trainer.arguments == (cli.model, None, None, cli.datamodule, None, None)
    assert cli.trainer.current_epoch == 2


def test_a_cluster_environment_among_the_plugins():
    settings = '"init_args": {"auto_requeue": false}'
    plugins = f'[{{"class_path": "lightning.fabric.plugins.environments.SLURMEnvironment", {settings}}}]'
    environment = build(f"--trainer.plugins={plugins}").trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert environment.auto_requeue is False


def test_further_arguments_of_a_profiler():
    words = ("--trainer.profiler=PyTorchProfiler", "--trainer.profiler.row_limit=10")
    cli = build(*words, "--trainer.profiler.dict_kwargs.profile_memory=true", "--trainer.profiler.record_shapes=true")
    assert cli.trainer.profiler.row_limit == 10
    assert cli.trainer.profiler.profiler_kwargs == {"profile_memory": True, "record_shapes": True}
    # The other arguments of torch's profiler differ by its version, so they are not part of the configuration.
    assert cli.config.trainer.profiler.dict_kwargs == {"profile_memory": True}
    assert not {"acc_events", "with_stack"} & set(cli.config.trainer.profiler.init_args.keys())


def test_what_is_printed_names_treadle(capsys):
    with pytest.raises(SystemExit):
        build("--trainer.callbacks=DeviceStatsMonitor", "--print_config")
    printed = capsys.readouterr().out
    assert printed.startswith(f"# treadle=={treadle.__version__}\n")
    assert "class_path: treadle.callbacks.DeviceStatsMonitor\n" in printed


def test_the_peers_module_has_it_too():
    assert treadle.compat.cli.LightningCLI is treadle.compat.LightningCLI is LightningCLI


@pytest.mark.long
def test_environment_variables(monkeypatch, here):
    (here / "fit.yaml").write_text("model:\n  lr: 0.07\n  mode: max\n")
    monkeypatch.setenv("PL_FIT__CONFIG", "fit.yaml")
    monkeypatch.setenv("PL_FIT__MODEL__LR", "0.3")
    monkeypatch.setenv("PL_FIT__TRAINER__FAST_DEV_RUN", "true")
    model = execute("fit", parser_kwargs={"default_env": True}).model
    assert (model.hparams.lr, model.hparams.mode) == (0.3, "max")
    assert execute("fit", "--trainer.max_epochs=0").model.hparams.lr == 0.02
    monkeypatch.setenv("PL_SUBCOMMAND", "validate")
    assert execute(parser_kwargs={"default_env": True}).subcommand == "validate"


# -- the configuration of a run --------------------------------------------------------------------------------------


def test_a_checkpoint_brings_its_hyperparameters(here, capsys):
    cli = execute("fit", "--model.lr=0.1", "--model.color=BLUE", "--model.options.width=9", trainer_defaults=SAVING)
    path = cli.trainer.checkpoint_callback.best_model_path
    tested = execute("test", f"--ckpt_path={path}", "--model.mode=max")
    hparams = tested.model.hparams
    assert (hparams.lr, hparams.color, hparams.options["width"], hparams.mode) == (0.1, "BLUE", 9, "min")
    assert torch.equal(tested.model.net.weight, cli.model.net.weight)
    with pytest.raises(SystemExit):
        execute("test", f"--ckpt_path={path}", model=Factories)
    assert "Parsing of ckpt_path hyperparameters failed" in capsys.readouterr().err
    named = execute("test", f"--model={MODEL}", f"--ckpt_path={path}", model=None)
    assert named.model.hparams.lr == 0.1


def test_the_words_of_the_shell_are_read(monkeypatch):
    words = ["fit", "--trainer.max_epochs=2", "--trainer.accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, *(f"--trainer.{name}=false" for name in NO_OUTPUT)])
    cli = LightningCLI(Model, Data, save_config_callback=None)
    assert cli.trainer.callback_metrics["val_loss"].item() == pytest.approx(3.149636, rel=1e-5)
