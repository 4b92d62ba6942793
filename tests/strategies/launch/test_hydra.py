"""Hydra applications whose ranks Treadle starts: the supervisor and its ranks share one output folder."""

import os
import subprocess
import sys
import textwrap

import pytest
from support.processes import clean_environment, python
from treadle.engine.checkpoint import OpenCheckpoint
from treadle.strategies.launch.supervisor import _quote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as other tests of the launcher do")

# A second for the clock between the supervisor and its ranks, whose name for the folder would otherwise be the same.
FOLDERS = """
import os, time
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.2", config_path=None)
def main(cfg):
    rank = os.environ.get("RANK", "no")
    line = f"{rank} rank: {HydraConfig.get().runtime.output_dir} {os.getcwd()} {cfg.get('lr')}\\n"
    os.write(1, line.encode())
    if rank == "no":
        time.sleep(1.1)
        from treadle.strategies.launch import supervisor
        supervisor.relaunch(2)

main()
"""
TRAINS = """
import hydra, torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf
from treadle.callbacks import LambdaCallback
from treadle.compat.demos.boring_classes import BoringModel
from treadle.loggers import CSVLogger

class Task(BoringModel):
    def __init__(self, net, cfg):
        super().__init__()
        self.save_hyperparameters()
        self.layer = self.hparams.net

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.cfg.lr)

@hydra.main(version_base="1.2", config_path=None)
def main(cfg):
    folder = HydraConfig.get().runtime.output_dir
    trainer = OmegaConf.create({
        "_target_": "treadle.Trainer", "accelerator": "cpu", "devices": 2, "max_epochs": 1, "default_root_dir": folder,
        "enable_progress_bar": False, "limit_train_batches": 2, "limit_val_batches": 0, "max_time": {"hours": 1},
    })
    # Hydra makes an OmegaConf list of each.
    trainer = instantiate(trainer, logger=[CSVLogger(folder)], callbacks=[LambdaCallback(setup=lambda *a, **k: None)])
    trainer.fit(Task(torch.nn.Linear(32, 2), cfg))

main()
"""


def application(folder, source, *arguments):
    (folder / "train.py").write_text(textwrap.dedent(source))
    command = [python(), "-W", "ignore", str(folder / "train.py"), *arguments]
    env = clean_environment({"CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "HYDRA" not in line]


@pytest.mark.long
def test_one_run_one_folder(tmp_path):
    folder = tmp_path / "it's here, {now}"
    lines = application(tmp_path, FOLDERS, f"hydra.run.dir={_quote(folder.name)}", "hydra.job.chdir=true", "+lr=1")
    assert sorted(lines) == [f"{rank} rank: {folder} {folder} 1" for rank in (0, 1, "no")]
    assert sorted(os.listdir(folder / ".hydra")) == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert "output_subdir: .hydra" in (folder / ".hydra" / "hydra.yaml").read_text()  # the supervisor's, not a rank's
    lines = application(tmp_path, FOLDERS)
    (made,) = (tmp_path / "outputs").glob("*/*")
    assert sorted(lines) == [f"{rank} rank: {made} {tmp_path} None" for rank in (0, 1, "no")]


@pytest.mark.long
def test_each_job_of_a_multirun_trains_on_both_ranks(tmp_path):
    application(tmp_path, TRAINS, "-m", "+lr=0.1,0.2")  # argparse takes no overrides both before and behind -m
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    for job, lr in (("0", "0.1"), ("1", "0.2")):
        (logs,) = (sweep / job / "treadle_logs").iterdir()
        assert f"lr: {lr}" in (logs / "hparams.yaml").read_text()
        (saved,) = (logs / "checkpoints").iterdir()
        assert saved.name == "epoch=0-step=2.ckpt"
        assert OpenCheckpoint(saved).has("rank-00001")


@pytest.mark.parametrize("text", ["/a/b c", "/it's", "/x\\", "/x\\'y", "/a,b=[c]{d}", "/a\\\\'b\\\\", "'"])
def test_any_path_is_a_value_of_hydras_grammar(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"key={_quote(text)}").value() == text
