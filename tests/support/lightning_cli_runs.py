"""Runs of LightningCLI in this process."""

from lightning_cli_samples import Data, Model
from treadle.cli import LightningCLI

from support.trainers import NO_OUTPUT

DEFAULTS = {"accelerator": "cpu", "max_epochs": 2, **NO_OUTPUT, "enable_report": False}


def execute(*words, cli=LightningCLI, model=Model, data=Data, **options):
    settings = {"trainer_defaults": DEFAULTS, "save_config_callback": None, "args": list(words), **options}
    return cli(model, data, **settings)


def build(*words, **options):
    return execute(*words, run=False, **options)
