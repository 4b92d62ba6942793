"""`LightningArgumentParser` reads settings as Lightning's, and says what is wrong with them."""

import json
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch
import yaml
from lightning_cli_samples import Color, Data, DeepEncoder, Encoder, Factories, Model, Options
from treadle.callbacks import EarlyStopping
from treadle.cli import LightningArgumentParser, instantiate_module
from treadle.cli.config import ConfigError
from treadle.cli.lightning_cli import ActionConfigFile, Namespace

import treadle


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return tmp_path


def make_parser(**options):
    parser = LightningArgumentParser(**{"exit_on_error": False, **options})
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_argument("--note", default="hi", help="a note")
    parser.add_lightning_class_args(treadle.Trainer, "trainer")
    parser.add_lightning_class_args(Model, "model")
    parser.add_optimizer_args()
    return parser


def parse(*words, **options):
    return make_parser(**options).parse_args(list(words))


def model_of(*words):
    return parse(*(f"--model.{word}" for word in words)).model


VALUES = {
    "lr=1e-3": ("lr", 1e-3),
    "lr=3": ("lr", 3.0),
    "sizes=[20, 10]": ("sizes", [20, 10]),
    "sizes+=5": ("sizes", [8, 5]),
    "color=BLUE": ("color", Color.BLUE),
    "path=a/b": ("path", Path("a/b")),
    "path=null": ("path", None),
    "mode=max": ("mode", "max"),
    "extra={a: {b: 1}}": ("extra", {"a": {"b": 1}}),
    "extra.a=3": ("extra", {"a": 3}),
    "flag=true": ("flag", True),
    "flag=no": ("flag", False),
    "name=7": ("name", 7),
    "name=a=b: c": ("name", "a=b: c"),
    "name=${HOME}": ("name", "${HOME}"),
    "activation=torch.tanh": ("activation", torch.tanh),
}


@pytest.mark.parametrize("word", VALUES)
def test_values_become_what_annotations_say(word):
    key, value = VALUES[word]
    converted = getattr(model_of(word), key)
    assert converted == value
    assert type(converted) is type(value)


def test_null_is_not_text():
    with pytest.raises(ConfigError, match=r"model.name=null must be an integer or text"):
        model_of("name=null")
    assert model_of("name='null'").name == "null"


def test_nested_classes():
    assert vars(model_of("options.width=9").options) == {"width": 9, "bias": True}
    assert vars(model_of("options={bias: false}").options) == {"width": 7, "bias": False}  # the rest as in the default
    model = model_of("encoder=DeepEncoder", "encoder.depth=4", "encoder.activation=ReLU")
    assert model.encoder.class_path == "lightning_cli_samples.DeepEncoder"
    assert (model.encoder.init_args.depth, model.encoder.init_args.width) == (4, 3)
    assert model.encoder.init_args.activation.class_path == "torch.nn.ReLU"


def test_the_arguments_that_another_class_takes_are_kept(capsys):
    words = ("--optimizer=Adam", "--optimizer.lr=0.5", "--optimizer.amsgrad=true", "--optimizer=SGD")
    optimizer = parse(*words).optimizer
    assert (optimizer.class_path, optimizer.init_args.lr) == ("torch.optim.SGD", 0.5)
    assert "removed from the settings: amsgrad, which SGD does not accept." in capsys.readouterr().err


def test_words_added_to_the_last_callback():
    words = ("callbacks+=EarlyStopping", "callbacks.monitor=a", "callbacks+=ModelCheckpoint", "callbacks.monitor", "b")
    words = [f"--trainer.{word}" if "=" in word or word[0] == "c" else word for word in words]
    callbacks = parse(*words).trainer.callbacks
    assert [callback.init_args.monitor for callback in callbacks] == ["a", "b"]
    single = parse("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=c").trainer.callbacks
    assert single.init_args.monitor == "c"
    profiler = parse("--trainer.profiler=SimpleProfiler").trainer.profiler
    assert profiler.class_path.endswith("SimpleProfiler")


WRONG = {
    "--model.lr=fast": r"command line: model.lr='fast' must be a number",
    "--model.lrr=1": r"model.lrr: Model has no argument 'lrr'. Did you mean 'lr'",
    "--model.color=GREEN": r"model.color='GREEN' must be 'RED' or 'BLUE'",
    "--model.mode=mix": r"model.mode='mix' must be 'min' or 'max'",
    "--model.sizes=[1, x]": r"model.sizes.1='x' must be an integer",
    "--model.batch_size=3.0": r"model.batch_size=3.0 must be an integer. Write 3.",
    "--model.flag=1": r"model.flag=1 must be true or false",
    "--model.options.widht=3": r"Options has no argument 'widht'. Did you mean 'width'",
    "--model.lr.x=3": r"model.lr={'x': 3} must be a number",
    "--modle.lr=3": r"unknown option --modle.lr. Did you mean '--model.lr'",
    "--model.lr": r"--model.lr needs a value. Write --model.lr=VALUE",
    "--note": r"--note needs a value",
    "-x": r"unknown option -x",
    "fit": r"unexpected 'fit': options begin with --",
    "--trainer.max_epoch=3": r"no argument 'max_epoch'. Did you mean 'max_epochs'",
    "--trainer.gpus=1": r"no argument 'gpus'. Use accelerator='gpu' and devices",
    "--trainer.callbacks+=EarlyStoping": r"no Callback named 'EarlyStoping'. Did you mean 'EarlyStopping'",
    "--trainer.callbacks+=EarlyStopping": r"EarlyStopping needs 'monitor'",
    "--optimizer=Adem": r"no Optimizer named 'Adem'. Did you mean 'Adam'",
    "--model.encoder=torch.nn.Linear": r"model.encoder='torch.nn.Linear' must be an Encoder or null",
    "--model.sizes=[1, 2": r"--model.sizes=\[1, 2: .*expected ',' or '\]'",
    "--config=nothing.yaml": r"nothing.yaml: the file does not exist",
    "--print_config=full": r"'full' is not one of comments, skip_null",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_is_wrong_names_option_value_and_rule(word):
    with pytest.raises(ConfigError, match=WRONG[word]):
        parse(word)


def test_an_error_ends_the_program_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--model.lr=fast", "--model.flag=1", exit_on_error=True)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "train.py: 2 problems:" in printed
    assert "`train.py --help` lists the options." in printed


def test_files_and_words_in_order(here):
    (here / "a.yaml").write_text("model:\n  lr: 0.1\n  sizes: [1, 2]\n  extra: {a: 1}\n  options: {width: 5}\n")
    (here / "b.yaml").write_text("model:\n  sizes: [3]\n  extra: {b: 2}\n  options: {bias: false}\n")
    (here / "model.yaml").write_text("lr: 0.7\nmode: max\n")
    (here / "c.yaml").write_text("model: model.yaml\nnote: file\n")
    model = parse("--model.lr=0.9", "--config", "a.yaml", "-c=b.yaml").model
    assert (model.lr, model.sizes, model.extra) == (0.1, [3], {"b": 2})  # dicts are replaced, objects merged
    assert vars(model.options) == {"width": 5, "bias": False}
    assert parse("--config=a.yaml", "--model.lr=0.9").model.lr == 0.9
    config = parse("--config=c.yaml", "--model.mode=min")
    assert (config.model.lr, config.model.mode, config.note) == (0.7, "min", "file")
    assert parse("--model", "model.yaml").model.lr == 0.7
    assert parse("--note=x", default_config_files=["c.y*ml", "none.yaml"]).model.lr == 0.7
    (here / "wrong.yaml").write_text("note: x\n\nmodel:\n  lrr: 3\n")
    with pytest.raises(ConfigError, match=r"wrong.yaml:4: model.lrr"):
        parse("--config=wrong.yaml")
    (here / "odd.yaml").write_text("modle:\n  lr: 3\n")
    with pytest.raises(ConfigError, match=r"odd.yaml:1: modle: unknown argument --modle. Did you mean 'model'"):
        parse("--config=odd.yaml")


def test_references_are_resolved_on_request(here):
    (here / "run.yaml").write_text("note: ${model.lr}\nmodel:\n  lr: 0.25\n  name: a\n")
    assert parse("--config=run.yaml").note == "${model.lr}"
    parser = make_parser(parser_mode="omegaconf")
    assert parser.parse_args(["--config=run.yaml"]).note == 0.25
    text = parser.dump(parser.parse_args(["--note=\\${x}"]))
    assert parser.parse_string(text).note == "${x}"


def test_an_unreadable_text_ends_as_an_unreadable_file_does(here, capsys):
    (here / "bad.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"text:\d"):
        make_parser().parse_string("{")
    for read in (lambda parser: parser.parse_string("{"), lambda parser: parser.parse_path("bad.yaml")):
        with pytest.raises(SystemExit) as ended:
            read(make_parser(exit_on_error=True))
        assert ended.value.code == 2
        assert "train.py" in capsys.readouterr().err


class Methods:
    def serve(self, port: int, host: str = "here", path: str = "/"):
        """Serve."""


def test_leading_arguments_of_a_method_are_skipped_by_number():
    for skip, added in ((None, ["port", "host", "path"]), ([1], ["host", "path"]), ({1, "path"}, ["host"])):
        parser = LightningArgumentParser(exit_on_error=False)
        assert parser.add_method_arguments(Methods, "serve", "serve", skip=skip) == added


def test_what_is_printed_is_read_back(capsys):
    words = ["--model.extra={a: ['1e-3', 1e-3, null]}", "--model.encoder=DeepEncoder", "--model.name=on", "--note=null"]
    with pytest.raises(SystemExit) as ended:
        parse(*words, "--optimizer=Adam", "--print_config")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    parser = make_parser()
    config = parser.parse_args([*words, "--optimizer=Adam"])
    again = parser.parse_string(text)
    assert again == config
    assert again.model.extra == {"a": ["1e-3", 1e-3, None]}
    with pytest.raises(SystemExit):
        parse("--model.lr=0.5", "--print_config=skip_null,skip_default")
    assert yaml.safe_load(capsys.readouterr().out) == {"model": {"lr": 0.5}}
    data = json.loads(parser.dump(config, format="json", skip_none=False))
    assert data["optimizer"]["class_path"] == "torch.optim.Adam"
    parser.save(config, "config.yaml", skip_none=False)
    assert parser.parse_path("config.yaml") == config
    with pytest.raises(FileExistsError, match="Pass overwrite=True"):
        parser.save(config, "config.yaml")


def test_help_lists_options_and_classes(capsys):
    for words, lines in {
        ("--help",): ["--model.lr LR", "the learning rate. (type: float, default: 0.02)", "--optimizer CLASS"],
        ("--optimizer.help", "SGD"): ["momentum: float; default 0"],
        ("--model.help",): ["Fits a plane."],
        ("--trainer.callbacks.help=EarlyStopping",): ["monitor: text; required"],
    }.items():
        with pytest.raises(SystemExit) as ended:
            parse(*words)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert [line for line in lines if line not in printed] == []


def test_single_options():
    class Level(Enum):
        LOW = 1

    def parse_pair(text):
        first, second = text.split(":")
        return int(first), second

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--count", "-n", type=int, required=True)
    parser.add_argument("--pair", type=parse_pair)
    parser.add_argument("--level", type=Level, default=Level.LOW)
    parser.add_argument("--kind", choices=["a", "b"], default="a")
    parser.add_argument("--many", nargs="*", type=float)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--note")
    parser.add_class_arguments(Options)
    config = parser.parse_args(["-n", "3", "--pair=1:x", "--many", "1", "2", "--dry-run", "--width=5", "--note=3"])
    assert (config.count, config.pair, config.level, config.kind) == (3, (1, "x"), Level.LOW, "a")
    assert (config.many, config.dry_run, config.width, config.bias) == ([1.0, 2.0], True, 5, True)
    assert config.note == "3"  # a word stays text, as in argparse
    assert parser.parse_object({"count": 1, "note": [1]}).note == [1]
    for words, message in {
        (): "--count is required",
        ("-n=3", "--pair=x"): r"pair='x' was rejected by parse_pair\(\)",
        ("-n=3", "--kind=c"): "kind='c' is not one of a, b",
        ("-n=x",): "count='x' must be an integer",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parser.parse_args(list(words))
    with pytest.raises(ValueError, match=r"positional arguments are not supported. Name it --file"):
        parser.add_argument("file")


def test_choices_and_conversions_of_options_without_a_value_and_of_lists():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--kind", choices=["a", "b"])
    parser.add_argument("--sizes", nargs="*", type=int, choices=[1, 2])
    parser.add_argument("--mark", type=lambda text: f"{text}!")
    parser.add_argument("--marks", nargs="+", type=lambda text: f"{text}!")
    parser.add_argument("--words", nargs="*")
    config = parser.parse_args(["--mark=4", "--sizes", "1", "2", "--marks", "a", "5", "--words", "1", "a"])
    assert config.words == ["1", "a"]  # they stay text, as in argparse
    for parsed in (
        config,
        parser.instantiate_classes(config),
        parser.parse_object({}, config),
        parser.parse_args([], namespace=config),
    ):
        assert (parsed.kind, parsed.sizes, parsed.mark, parsed.marks) == (None, [1, 2], "4!", ["a!", "5!"])
    with pytest.raises(ConfigError, match=r"sizes\.1=3 is not one of 1, 2"):
        parser.parse_args(["--sizes", "1", "3"])
    with pytest.raises(ConfigError, match=r"sizes\.0='x' is not one of 1, 2"):
        parser.parse_args(["--sizes", "x"])


def test_the_help_lists_names_and_choices():
    parser = LightningArgumentParser(prog="train.py", epilog="See the documentation.")
    parser.add_argument("--kind", "-k", choices=["a", "b"], default="a", help="the kind")
    parser.add_argument("--dry-run", action="store_true")
    text = parser.format_help()
    assert "  -k, --kind KIND\n      the kind (one of a, b, default: a)\n" in text
    assert "  --dry-run\n" in text
    assert "--config" not in text
    assert text.endswith("\nSee the documentation.")
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    assert "  -c, --config FILE\n" in parser.format_help()


def test_links_are_checked_where_they_are_made():
    parser = make_parser()
    parser.add_lightning_class_args(Data, "data")
    parser.link_arguments("data.batch_size", "model.batch_size")
    assert parser.parse_args(["--data.batch_size=5"]).model.batch_size == 5
    assert "batch_size" not in yaml.safe_load(parser.dump(parser.parse_args([])))["model"]
    with pytest.raises(ConfigError, match=r"model.batch_size is set by a link from --data.batch_size. Set the source"):
        parser.parse_args(["--model.batch_size=3"])
    for arguments, message in {
        ("data.batch_size", "modle.lr"): "unknown argument 'modle.lr'. Did you mean 'model'",
        ("data.batch_size", "model.batch_size"): "is already the target of a link",
        (("data.batch_size", "note"), "model.lr"): "needs compute_fn",
        ("model.lr", "data.samples"): "are circular",
    }.items():
        with pytest.raises(ValueError, match=message):
            parser.link_arguments(*arguments)
    with pytest.raises(ValueError, match="apply_on='late'"):
        parser.link_arguments("note", "model.name", apply_on="late")
    with pytest.raises(ValueError, match="would have to be built before itself"):
        parser.link_arguments("model.lr", "model.name", apply_on="instantiate")


def test_a_link_at_instantiation_sets_an_argument_of_a_nested_object():
    parser = make_parser()
    parser.add_lightning_class_args(Data, "data")
    parser.link_arguments("data.batch_size", "model.encoder.init_args.depth", apply_on="instantiate")
    config = parser.parse_args(["--data.batch_size=7", "--model.encoder=DeepEncoder"])
    assert "depth" not in config.model.encoder.init_args
    assert parser.instantiate_classes(config).model.encoder.depth == 7


def test_defaults():
    parser = make_parser()
    parser.set_defaults({"model.encoder": {"class_path": "lightning_cli_samples.DeepEncoder"}, "note": "new"})
    config = parser.parse_args(["--model.encoder.depth=7"])
    assert (config.note, config.model.encoder.init_args.depth) == ("new", 7)
    assert parser.get_defaults().model.encoder.class_path == "lightning_cli_samples.DeepEncoder"
    assert parser.get_default("model.lr") == 0.02
    parser.set_defaults({"model.encoder": DeepEncoder(depth=3)})
    assert parser.instantiate_classes(parser.parse_args([])).model.encoder.depth == 3
    with pytest.raises(ValueError, match=r"unknown argument 'modle.lr'"):
        parser.set_defaults({"modle.lr": 3})


def test_a_default_that_is_a_function_stays_as_it_is():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Factories, "model")
    default = parser.parse_args([]).model
    assert (default.optimizer, default.schedule.__name__) == (torch.optim.Adam, "<lambda>")
    named = parser.parse_args(["--model.optimizer.lr=0.5"]).model.optimizer
    assert (named.class_path, named.init_args.lr) == ("torch.optim.Adam", 0.5)
    with pytest.raises(ConfigError, match=r"model.schedule=\{'factor': 0.5\} must be"):
        parser.parse_args(["--model.schedule.factor=0.5"])


def test_only_objects_of_a_run_are_added_as_such():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(EarlyStopping, "early")
    assert parser.callback_keys == ["early"]
    with pytest.raises(ValueError, match="pass a class that extends Trainer, TaskModule, DataModule or Callback"):
        parser.add_lightning_class_args(Encoder, "encoder")
    with pytest.raises(ConfigError, match="EarlyStopping needs 'monitor'"):
        parser.parse_args([])
    with pytest.raises(TypeError, match="must be a class that extends Optimizer"):
        parser.add_optimizer_args(Encoder)
    with pytest.raises(TypeError, match="parser_mod"):
        LightningArgumentParser(parser_mod="omegaconf")


def test_a_module_from_its_settings():
    model = instantiate_module(Model, {"lr": 0.3, "color": "BLUE"})
    assert (model.hparams.lr, model.hparams.color) == (0.3, Color.BLUE)
    named = instantiate_module(treadle.TaskModule, {"_class_path": "lightning_cli_samples.Model", "lr": 0.3})
    assert type(named) is Model


def test_namespaces():
    config = Namespace({"a.b": 1, "c": {"d": 2}}, e=[Namespace(f=3)])
    assert (config.a.b, config["a.b"], config["c.d"], config.get("a.x", 5)) == (1, 1, 2, 5)
    assert "a.b" in config
    assert "a.x" not in config
    assert list(config.items()) == [("a.b", 1), ("c", {"d": 2}), ("e", [Namespace(f=3)])]
    assert config.as_dict() == {"a": {"b": 1}, "c": {"d": 2}, "e": [{"f": 3}]}
    copied = config.clone()
    copied["a.b"] = 7
    copied.c["d"] = 8
    assert (config.a.b, config.c) == (1, {"d": 2})
    assert copied.pop("a.b") == 7
    with pytest.raises(KeyError):
        copied.pop("a.b")
