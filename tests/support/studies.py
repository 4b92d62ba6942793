"""Studies of a sweep file."""

from pathlib import Path

from treadle.tools.sweep.sweep_file import read_sweep

TEXT = """
config: {model: {class: tasks.Line}, trainer: {max_epochs: 9}}
method: random
metric: {name: val_loss, goal: minimize}
trials: 20
parameters:
  model.lr: {min: 1e-4, max: 1e-1, log: true}
  model.width: {min: 8, max: 64, step: 8}
  model.kind: [a, b, c]
"""


def make(text=TEXT, *overrides):
    Path("s.yaml").write_text(text)
    return read_sweep("s.yaml", overrides)
