"""Configurations that tests check, build and print."""

from treadle.cli.config.instantiate import build
from treadle.cli.config.resolve import load


def checked(text, *overrides, **known):
    return build.check(load([], overrides, earlier=("run.yaml", text)), **known)


MANY = "model: {class: cli_samples.Many, hidden: 3}\n"


def made(text, *overrides):
    return load([], overrides, earlier=("run.yaml", text)).to_plain()


def wrote(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return [f"{name}.yaml" for name in files]
