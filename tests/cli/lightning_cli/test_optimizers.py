"""Optimizers in the settings of LightningCLI."""

import pytest
import torch
from lightning_cli_samples import Linked, Model
from support.lightning_cli_runs import build, execute
from treadle.cli import LightningCLI

import treadle


def test_settings_of_optimizers_go_into_the_model():
    class Two(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(nested_key="first", link_to="model.first")
            parser.add_optimizer_args((torch.optim.SGD, torch.optim.Adam), nested_key="second", link_to="model.second")
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR, link_to="model.schedule")

    words = ("--first=Adam", "--second=SGD", "--second.lr=0.01", "--lr_scheduler.gamma=0.3")
    first, second, schedule = build(*words, cli=Two, model=Linked).model.linked
    assert (first["class_path"], first["init_args"]["lr"]) == ("torch.optim.Adam", 0.001)
    assert (second["class_path"], second["init_args"]["lr"]) == ("torch.optim.SGD", 0.01)
    assert schedule["class_path"] == "torch.optim.lr_scheduler.ExponentialLR"
    assert schedule["init_args"]["gamma"] == 0.3
    optimizer = treadle.cli.instantiate_class(torch.nn.Linear(2, 2).parameters(), second)
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.SGD, 0.01)


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_the_settings_optimizer_is_announced_and_may_be_changed():
    class Halved(LightningCLI):
        @staticmethod
        def configure_optimizers(lightning_module, optimizer, lr_scheduler=None):
            lightning_module.seen = [type(optimizer), type(lr_scheduler)]
            return optimizer

    words = ("fit", "--optimizer=Adam", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2")
    with pytest.warns(UserWarning, match=r"`Model.configure_optimizers` will be overridden by `Halved"):
        cli = execute(*words, cli=Halved)
    assert cli.model.seen == [torch.optim.Adam, torch.optim.lr_scheduler.StepLR]
    with pytest.raises(SystemExit):
        execute(*words, auto_configure_optimizers=False)


@pytest.mark.filterwarnings("ignore:.*will be overridden by")
def test_an_optimizer_is_built_when_the_run_asks_for_it():
    class Late(Model):
        def __init__(self):
            super().__init__()
            del self.net

        def configure_model(self):
            if not hasattr(self, "net"):
                self.net = torch.nn.Linear(4, 2)

    cli = execute("fit", "--optimizer=SGD", "--optimizer.lr=0.02", "--trainer.max_epochs=1", model=Late)
    assert cli.trainer.optimizers[0].param_groups[0]["params"] == [cli.model.net.weight, cli.model.net.bias]
