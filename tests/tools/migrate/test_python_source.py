"""Imports of Python files after a migration, in the styles that public programs have."""

import ast
import importlib

import pytest
from treadle.tools.migrate.python_source import migrate_source

CASES = {
    "aliases": """
        -import lightning as L
        -import lightning.pytorch as pl
        +import treadle as L
        +import treadle as pl

         class Model(L.LightningModule): ...
        -trainer = L.Trainer(callbacks=[L.pytorch.callbacks.Timer()])
        +trainer = L.Trainer(callbacks=[L.callbacks.Timer()])
         isinstance(x, pl.LightningModule) and pl.utilities.rank_zero.rank_zero_only(f)
         pl.core.LightningModule, pl.loggers.CSVLogger
        """,
    "packages without alias": """
        -import lightning, accelerate
        -import os, lightning.pytorch.callbacks, lightning
        -model = lightning.LightningModule()
        -trainer = lightning.pytorch.Trainer(callbacks=[lightning.pytorch.callbacks.Timer()])
        -accelerator = accelerate.Accelerator()
        -accelerate.state.PartialState().print(accelerate.utils.tqdm)
        +import treadle
        +import os, treadle.callbacks, treadle
        +model = treadle.LightningModule()
        +trainer = treadle.Trainer(callbacks=[treadle.callbacks.Timer()])
        +accelerator = treadle.Accelerator()
        +treadle.state.PartialState().print(treadle.utils.tqdm)
        """,
    "shadowed names": """
        -import lightning
        +import treadle
         def run(lightning): return lightning.pytorch.Trainer()
        -def other(): return lightning.pytorch.Trainer()
        -def default(lightning=lightning.Trainer): return [lightning for lightning in ()]
        +def other(): return treadle.Trainer()
        +def default(lightning=treadle.Trainer): return [lightning for lightning in ()]
         class Strike:
             lightning = 1
        -    def hit(self): return lightning.Trainer
        +    def hit(self): return treadle.Trainer
        """,
    "a global that a function imports": """
         def load():
             global lightning, pl
        -    import lightning
        -    import lightning as pl
        +    import treadle
        +    import treadle as pl
         def use():
        -    return lightning.pytorch.Trainer, pl.pytorch.Trainer
        +    return treadle.Trainer, pl.Trainer
        """,
    "names and modules imported from packages": """
        -from pytorch_lightning import Trainer, seed_everything
        -from pytorch_lightning.callbacks.early_stopping import EarlyStopping as Stop
        -from accelerate import Accelerator, DistributedDataParallelKwargs
        -from accelerate.utils import ProjectConfiguration, set_seed
        -from lightning import pytorch as pl, Trainer
        -from lightning import pytorch
        -from lightning.pytorch import callbacks, loggers as pl_loggers
        -from accelerate import utils
        +from treadle import Trainer, seed_everything
        +from treadle.callbacks.early_stopping import EarlyStopping as Stop
        +from treadle import Accelerator, DistributedDataParallelKwargs
        +from treadle.utils import ProjectConfiguration, set_seed
        +import treadle as pl
        +from treadle import Trainer
        +import treadle as pytorch
        +from treadle import callbacks, loggers as pl_loggers
        +from treadle import utils
         pytorch.Trainer, callbacks.Timer, pl_loggers.CSVLogger, utils.set_seed
        """,
    "what only compat has": """
        -from lightning.pytorch.core import LightningModule
        -from lightning.pytorch.core.module import LightningModule as Base
        -import lightning.pytorch.core as core
        +from treadle.compat.core import LightningModule
        +from treadle.compat.core.module import LightningModule as Base
        +import treadle.compat.core as core
         core.LightningModule
        -from lightning.fabric import seed_everything
        -from lightning.fabric.utilities.seed import seed_everything as seed
        -from lightning_fabric.utilities.rank_zero import rank_zero_only
        +from treadle.compat.fabric import seed_everything
        +from treadle.compat.fabric.utilities.seed import seed_everything as seed
        +from treadle.compat.fabric.utilities.rank_zero import rank_zero_only
        """,
    "within functions, try and TYPE_CHECKING": """
         try:
        -    import lightning.pytorch as pl
        +    import treadle as pl
         except ImportError:
        -    import pytorch_lightning as pl
        +    import treadle as pl
         if TYPE_CHECKING:
        -    from lightning.pytorch import Trainer
        -def build(trainer: "lightning.pytorch.Trainer"):
        -    from lightning.pytorch.loggers import CSVLogger; return CSVLogger
        -if True: import accelerate; accelerate.utils.set_seed(1)
        +    from treadle import Trainer
        +def build(trainer: "treadle.Trainer"):
        +    from treadle.loggers import CSVLogger; return CSVLogger
        +if True: import treadle; treadle.utils.set_seed(1)
        """,
    "stars": """
        -from pytorch_lightning import *
        -from lightning.pytorch.callbacks import *
        +from treadle.compat import *
        +from treadle.callbacks import *
         class Model(LightningModule): ...
         Trainer(callbacks=[Timer()])
        """,
    "parentheses and comments": """
         # the trainer
        -from lightning.pytorch.callbacks import (  # all of them
        +from treadle.callbacks import (  # all of them
             Callback,  # base
             Timer as Clock,

             # stops
             EarlyStopping,
         )  # noqa: F401
        -from accelerate.utils import set_seed, \\
        +from treadle.utils import set_seed, \\
             gather
        """,
    "strings": '''
         """lightning.pytorch.Trainer"""
         import logging  # lightning.pytorch
        -logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
        -logging.getLogger("lightning").setLevel(logging.ERROR)
        -callback = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "name": "lightning"}
        -module = importlib.import_module("pytorch_lightning")
        -patch('accelerate.utils.set_seed')
        +logging.getLogger("treadle").setLevel(logging.ERROR)
        +logging.getLogger("treadle").setLevel(logging.ERROR)
        +callback = {"_target_": "treadle.callbacks.ModelCheckpoint", "name": "lightning"}
        +module = importlib.import_module("treadle")
        +patch('treadle.utils.set_seed')
         text = "see lightning.pytorch.Trainer", f"lightning.pytorch.Trainer", "accelerate.log", r"lightning"
         groups = "lightning.callbacks", "accelerate.utils", "lightning.trainer.name"
        ''',
    "paths of older versions, and of modules that import a name": """
        -from pytorch_lightning.callbacks.base import Callback
        -from pytorch_lightning.core.lightning import LightningModule
        -from pytorch_lightning.utilities.distributed import rank_zero_only
        -from accelerate.accelerator import Accelerator, DataLoaderConfiguration
        -import pytorch_lightning as pl
        -pl.utilities.distributed.rank_zero_only
        +from treadle.callbacks import Callback
        +from treadle.compat.core import LightningModule
        +from treadle.utilities import rank_zero_only
        +from treadle.compat.accelerator import Accelerator, DataLoaderConfiguration
        +import treadle as pl
        +pl.utilities.rank_zero_only
        """,
    "integrations of other libraries": """
        -import lightning as L
        -from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
        -from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback as Report
        -from optuna.integration import LightGBMPruningCallback, PyTorchLightningPruningCallback
        -from optuna_integration.pytorch_lightning import PyTorchLightningPruningCallback as Prune
        +import treadle as L
        +from treadle.compat.ray import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
        +from treadle.compat.ray import TuneReportCheckpointCallback as Report
        +from treadle.integrations import PyTorchLightningPruningCallback
        +from optuna.integration import LightGBMPruningCallback
        +from treadle.integrations import PyTorchLightningPruningCallback as Prune
         from optuna.integration import TFKerasPruningCallback
         import optuna.integration
        """,
    "what belongs to nobody": """
         from . import accelerate
         from .lightning import Trainer
         from ..lightning.pytorch import Trainer as Other
         import lightning_utilities, torchmetrics, lightning_bolts, accelerated
         accelerate.state.PartialState()
        """,
}


def take_side(sign, name):
    """The lines of a case with the sign, among those without one."""
    lines = [line[8:] for line in CASES[name].splitlines()[1:-1]]
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", sign))


@pytest.mark.parametrize("name", CASES)
def test_style(name):
    new = take_side("+", name)
    assert migrate_source(take_side("-", name), "file.py") == migrate_source(new, "file.py") == (new, [])


@pytest.mark.parametrize("name", CASES)
def test_the_imports_work(name):
    for node in ast.walk(ast.parse(take_side("+", name))):
        lines = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in lines:
            assert not module.startswith("treadle") or importlib.import_module(module)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("treadle"):
            exec(ast.unparse(node), {})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_stay(end):
    old = "import lightning as L\nfrom accelerate.utils import (\n gather,\n flux,\n)\nx"
    new = "import treadle as L\nfrom treadle.utils import (\n gather,\n)\nfrom accelerate.utils import (\n flux,\n)\nx"
    assert migrate_source(old.replace("\n", end), "file.py")[0] == new.replace("\n", end)


def test_a_deep_expression_is_no_hindrance():
    source = "import lightning as L\nx = " + " + ".join(["L.pytorch.Trainer"] * 900) + "\n"
    assert migrate_source(source, "file.py")[0].count("L.Trainer") == 900
