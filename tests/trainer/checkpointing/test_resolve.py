"""`ckpt_path="last"`, `"best"`, `"auto"` or a path: which checkpoint that is, what is skipped, and what is said."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from support.models import Line, loader
from support.processes import run
from support.stored import DEAD
from support.trainers import make_trainer
from treadle.callbacks import Checkpoint, LambdaCallback, ModelCheckpoint
from treadle.engine.checkpoint import store
from treadle.loggers import CSVLogger
from treadle.trainer.runs.folder import RunFolder


class Tiny(Line):
    """Five steps an epoch; its validation logs 3.0, 1.0, 2.0, 4.0 in epochs 0 to 3."""

    def validation_step(self, batch, batch_idx):
        self.log("val", (3.0, 1.0, 2.0, 4.0)[min(self.trainer.current_epoch, 3)])


def made(root, *callbacks, **flags):
    """As in a new process: it knows of nothing that was saved."""
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    defaults = {"max_epochs": 2, "default_root_dir": root, "enable_checkpointing": saves}
    return make_trainer(**{**defaults, **flags}, callbacks=list(callbacks))


def fit(root, *callbacks, ckpt_path=None, **flags):
    """Train; returns the trainer, and after how many steps it began."""
    began = []
    note = LambdaCallback(on_train_start=lambda trainer, _: began.append(trainer.global_step))
    own = made(root, *callbacks, note, **flags)
    own.fit(Tiny(), loader(10), loader(4), ckpt_path=ckpt_path)
    return own, began[0]


def each(root, **more):
    return ModelCheckpoint(root / "c", "{step}", every_n_train_steps=2, save_top_k=-1, **more)


@pytest.fixture
def words(caplog):
    """What is announced."""
    caplog.set_level("INFO", "treadle")
    return caplog


# -- damage --------------------------------------------------------------------------------------------------------


def truncate(path):
    file = path / "model.safetensors" if path.is_dir() else path
    os.truncate(file, file.stat().st_size // 2)


def flip(path):
    """Flip a bit of the weights in a file."""
    data = bytearray(path.read_bytes())
    data[store.read_manifest(path).records.entries["data/0"]["at"]] ^= 1
    path.write_bytes(data)


def flip_name(path):
    """Flip a bit of the text from which a file is recognized at its beginning."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b"treadle/format", b"treadle/fopmat", 1))


# How any damage to any file is found is a test of the store.
DAMAGES = {
    "truncated": ("file", truncate, r"is truncated, or its end is damaged"),
    "a bit flipped": ("file", flip, r"data/0 is not what was written"),
    "a bit of its name flipped": ("file", flip_name, "the zip structure between its records is damaged"),
    "empty": ("file", lambda path: os.truncate(path, 0), "is a file, but not a checkpoint|is empty"),
    "of another library": (
        "file",
        lambda path: torch.save({}, path),
        "is a file, but not a checkpoint|has no tensors",
    ),
    "a file truncated": ("directory", truncate, "model.safetensors has"),
    "a file lost": ("directory", lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "no manifest": ("directory", lambda path: (path / "manifest.json").write_text("{"), "manifest.json can't be read"),
}


@pytest.mark.guarantee
@pytest.mark.parametrize(("word", "name"), [*(("last", name) for name in DAMAGES), ("auto", "a bit flipped")])
def test_the_newest_that_is_intact_is_taken_and_what_was_skipped_is_said(tmp_path, words, word, name):
    form, damage, reason = DAMAGES[name]
    fit(tmp_path, each(tmp_path, format=form))
    damage(tmp_path / "c" / "step=10.ckpt")
    words.clear()
    with pytest.warns(UserWarning, match=rf"ckpt_path='{word}' skips a checkpoint: .*step=10.ckpt.*({reason})"):
        _, began = fit(tmp_path, each(tmp_path), ckpt_path=word)
    assert began == 8
    said = [text for text in words.messages if "ckpt_path" in text]
    assert said == [f"ckpt_path='{word}': fit resumes from {tmp_path / 'c' / 'step=8.ckpt'} (optimizer step 8)"]


@pytest.mark.guarantee
@pytest.mark.parametrize(("form", "damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_path_never_stands_for_another_checkpoint(tmp_path, form, damage, reason):
    fit(tmp_path, each(tmp_path, format=form))
    path = tmp_path / "c" / "step=10.ckpt"
    damage(path)
    for stage in ("fit", "validate"):
        with pytest.raises(ValueError, match=rf"step=10.ckpt.*({reason})"):
            getattr(made(tmp_path, each(tmp_path)), stage)(Tiny(), loader(10), ckpt_path=path)


def test_all_are_damaged(tmp_path, words):
    fit(tmp_path, ModelCheckpoint(tmp_path / "c"))
    truncate(tmp_path / "c" / "epoch=1-step=10.ckpt")
    with pytest.raises(ValueError, match=r"no intact checkpoint in .*c; .*epoch=1-step=10.ckpt is truncated"):
        fit(tmp_path, ModelCheckpoint(tmp_path / "c"), ckpt_path="last")
    with pytest.warns(UserWarning, match="skips a checkpoint"):
        assert fit(tmp_path, ModelCheckpoint(tmp_path / "c"), ckpt_path="auto")[1] == 0
    assert [text for text in words.messages if "from scratch, because there is no intact checkpoint" in text]
    assert (tmp_path / "c" / "epoch=1-step=10-v1.ckpt").is_file()  # and what is damaged is left to look at


def test_weights_alone_are_nothing_to_go_on_from(tmp_path):
    weights = ModelCheckpoint(tmp_path / "c", "w-{step}", every_n_train_steps=5, save_weights_only=True, save_top_k=-1)
    fit(tmp_path, weights, each(tmp_path), max_epochs=-1, max_steps=5)
    with pytest.warns(UserWarning, match=r"w-step=5.ckpt contains only weights"):
        assert fit(tmp_path, each(tmp_path), ckpt_path="last")[1] == 4
    own = made(tmp_path, each(tmp_path))
    (tmp_path / "c" / "step=6.ckpt").unlink(missing_ok=True)
    own.validate(Tiny(), loader(4), ckpt_path="last", verbose=False)  # weights are all that is wanted


# -- where ---------------------------------------------------------------------------------------------------------


def test_nothing_is_there_yet(tmp_path, words):
    with pytest.raises(ValueError, match=r"ckpt_path='best', but the ModelCheckpoint has saved no best checkpoint"):
        fit(tmp_path, each(tmp_path), ckpt_path="best")
    assert fit(tmp_path, each(tmp_path), ckpt_path="auto")[1] == 0
    said = [text for text in words.messages if "ckpt_path" in text]
    assert said == [
        f"ckpt_path='auto': fit starts from scratch, because there is no checkpoint to resume from in {tmp_path / 'c'}"
    ]
    assert fit(tmp_path, each(tmp_path), ckpt_path="auto")[1] == 10
    with pytest.warns(UserWarning, match=r"ckpt_path='last': fit starts from scratch, .* to resume from in .*/empty"):
        assert fit(tmp_path, ModelCheckpoint(tmp_path / "empty"), ckpt_path="last")[1] == 0
    assert fit(tmp_path, ModelCheckpoint(tmp_path / "empty"), ckpt_path="last")[1] == 10


def test_an_evaluation_without_any_checkpoint_takes_the_weights_of_the_model_that_was_passed(tmp_path):
    task, own = Tiny(), made(tmp_path, each(tmp_path))
    task.predict_step = lambda batch, batch_idx: task.net.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"predict takes the model's current weights, .* no checkpoint in .*/c"):
        assert torch.equal(own.predict(task, loader(4), ckpt_path="last")[0], task.net.weight)
    assert own.ckpt_path is None
    with pytest.raises(ValueError, match=r"ckpt_path='last', but there is no intact checkpoint in .*/c"):
        own.validate(dataloaders=loader(4), ckpt_path="last")  # the task of the last stage
    fit(tmp_path, ModelCheckpoint(tmp_path / "c"), max_epochs=1)
    truncate(tmp_path / "c" / "epoch=0-step=5.ckpt")
    with pytest.raises(ValueError, match=r"no intact checkpoint in .*c; .*epoch=0-step=5.ckpt is truncated"):
        made(tmp_path, each(tmp_path)).validate(Tiny(), loader(4), ckpt_path="last")
    with RunFolder.create(tmp_path, "run") as folder:
        pass
    with RunFolder.open(folder.path), pytest.raises(ValueError, match="no intact checkpoint"):
        made(tmp_path, ModelCheckpoint(folder.path / "checkpoints")).validate(Tiny(), loader(4), ckpt_path="last")


def test_the_highest_version_that_has_an_intact_one(tmp_path):
    def logger():
        return CSVLogger(tmp_path, name="runs")

    for epochs in (3, 2, 1):  # versions 0, 1, 2
        fit(tmp_path, ModelCheckpoint(), logger=logger(), max_epochs=epochs)
    (tmp_path / "runs" / "version_10").mkdir()  # began, and saved nothing
    assert fit(tmp_path, ModelCheckpoint(), logger=logger(), ckpt_path="last")[1] == 5
    newest = max((tmp_path / "runs").iterdir(), key=lambda path: int(path.name[8:]))
    assert newest.name == "version_11"
    shutil.rmtree(newest)
    truncate(tmp_path / "runs" / "version_2" / "checkpoints" / "epoch=0-step=5.ckpt")
    with pytest.warns(UserWarning, match="version_2"):
        assert fit(tmp_path, ModelCheckpoint(), logger=logger(), ckpt_path="auto")[1] == 10
    shutil.rmtree(tmp_path / "runs" / "version_0" / "checkpoints")
    with pytest.warns(UserWarning, match="version_0"):  # a version that is asked for is the only one
        assert fit(tmp_path, ModelCheckpoint(), logger=CSVLogger(tmp_path, "runs", 0), ckpt_path="last")[1] == 0


def test_a_search_that_finds_nothing_claims_no_version(tmp_path):
    with pytest.raises(ValueError, match="no intact checkpoint"):
        fit(tmp_path, ModelCheckpoint(), logger=CSVLogger(tmp_path, "runs"), ckpt_path="best")
    assert not (tmp_path / "runs").exists()


def test_folders_below_and_several_callbacks(tmp_path):
    often = ModelCheckpoint(tmp_path / "often", "{epoch}/{step}", every_n_train_steps=3, save_top_k=-1)
    seldom = ModelCheckpoint(tmp_path / "seldom", every_n_train_steps=7)
    fit(tmp_path, seldom, often)
    assert (tmp_path / "often" / "epoch=1" / "step=9.ckpt").is_file()
    again = ModelCheckpoint(tmp_path / "often", "{epoch}/{step}", every_n_train_steps=3, save_top_k=-1)
    assert fit(tmp_path, ModelCheckpoint(tmp_path / "seldom", every_n_train_steps=7), again, ckpt_path="last")[1] == 9


class Kept(Checkpoint):
    """A callback whose checkpoints are somewhere that the Trainer does not search."""

    keeper = "the vault"

    def __init__(self, path=None):
        self.path = path

    def resume_path(self):
        return self.path


def test_a_callback_names_the_checkpoint_that_somebody_else_keeps(tmp_path, words):
    assert fit(tmp_path, Kept(), ckpt_path="auto")[1] == 0
    own, _ = fit(tmp_path, each(tmp_path), max_epochs=1)
    own.save_checkpoint(tmp_path / "vault" / "one")
    for word in ("last", "auto"):
        assert fit(tmp_path, Kept(tmp_path / "vault" / "one"), ckpt_path=word)[1] == 5
    assert fit(tmp_path, Kept(), each(tmp_path), ckpt_path="last")[1] == 4  # it has none, so the folders are searched
    said = [text for text in words.messages if text.startswith("ckpt_path=")]
    assert said[0].startswith("ckpt_path='auto': fit starts from scratch")
    assert said[0].endswith("to resume from in the vault's checkpoints")
    with pytest.warns(UserWarning, match="ckpt_path='last': fit starts from scratch"):
        assert fit(tmp_path, Kept(), ckpt_path="last")[1] == 0
    with pytest.warns(UserWarning, match="validate takes .* no checkpoint in the vault's checkpoints"):
        made(tmp_path, Kept()).validate(Tiny(), loader(4), ckpt_path="last")
    own = made(tmp_path, Kept())
    own.validate(Tiny(), loader(4))
    with pytest.raises(ValueError, match="'last', but there is no intact checkpoint in the vault's checkpoints"):
        own.validate(dataloaders=loader(4), ckpt_path="last")


def test_callbacks_that_the_task_brings(tmp_path):
    class Brings(Tiny):
        def configure_callbacks(self):
            return [each(tmp_path)]

    made(tmp_path).fit(Brings(), loader(10))
    own = made(tmp_path)
    own.fit(Brings(), loader(10), ckpt_path="last")
    assert own.ckpt_path == str(tmp_path / "c" / "step=10.ckpt")


@pytest.mark.parametrize("form", ["file", "directory"])
def test_what_a_killed_run_left_is_set_right_first(tmp_path, words, form):
    def keeper():
        return ModelCheckpoint(tmp_path / "c", save_last=True, save_top_k=0, format=form)

    fit(tmp_path, keeper())
    names = "last.ckpt", f".last.ckpt.{DEAD}.old", f".step=12.ckpt.{DEAD}.part"
    last, old, part = (tmp_path / "c" / name for name in names)
    # Killed between the two renames of a replacement, and while another was being written.
    last.rename(old)
    if form == "file":
        part.write_bytes(old.read_bytes()[:500])
    else:
        shutil.copytree(old, part)
        (part / "manifest.json").unlink()
    own, began = fit(tmp_path, keeper(), ckpt_path="last", max_epochs=3)
    assert (began, own.ckpt_path) == (10, str(last))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["last.ckpt"]
    assert [text for text in words.messages if "restored" in text]


# -- the best ------------------------------------------------------------------------------------------------------


def best(root, **more):
    return ModelCheckpoint(root / "c", "{epoch}", monitor="val", save_last=True, **more)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_best_without_a_fit_is_an_error_but_in_the_folder_of_a_run(tmp_path, stage):
    class Evaluated(Tiny):
        def test_step(self, batch, batch_idx):
            self.log("test", 1.0)

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    def evaluate(saver):
        own = made(tmp_path, saver)
        getattr(own, stage)(Evaluated(), loader(4), ckpt_path="best")
        return Path(own.ckpt_path)

    made(tmp_path, best(tmp_path)).fit(Evaluated(), loader(10), loader(4))
    with pytest.raises(ValueError, match=f"ckpt_path='best': {stage} was called without a fit in this process"):
        evaluate(best(tmp_path))
    with RunFolder.create(tmp_path / "runs") as folder:
        flags = folder.flags({"callbacks": [ModelCheckpoint(filename="{epoch}", monitor="val")]})
        made(folder.path, *flags["callbacks"]).fit(Evaluated(), loader(10), loader(4))
    kept = folder.path / "checkpoints"
    assert evaluate(ModelCheckpoint(kept, monitor="val")) == kept / "epoch=1.ckpt"


def test_a_best_that_is_gone_is_an_error(tmp_path):
    fit(tmp_path, best(tmp_path), max_epochs=3)
    store.remove(tmp_path / "c" / "epoch=1.ckpt")
    with pytest.raises(ValueError, match=r"epoch=1.ckpt, the best checkpoint according to .*last.ckpt, does not exist"):
        fit(tmp_path, best(tmp_path), ckpt_path="best")


def test_the_best_of_a_run_that_was_moved(tmp_path):
    fit(tmp_path / "here", best(tmp_path / "here"), max_epochs=3)
    shutil.move(tmp_path / "here", tmp_path / "there")
    own, began = fit(tmp_path, best(tmp_path / "there"), ckpt_path="best")
    assert (began, own.ckpt_path) == (10, str(tmp_path / "there" / "c" / "epoch=1.ckpt"))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("hpc", ValueError, "Use 'last'"),
        ("registry", ValueError, "no model registry"),
        ("registry:name:version:3", ValueError, "no model registry"),
        ("newest", ValueError, "'last', 'best' or 'auto'"),
        (7, TypeError, "ckpt_path=7.* a checkpoint's path"),
    ],
)
def test_words_that_mean_nothing_here(tmp_path, path, error, text):
    with pytest.raises(error, match=text):
        fit(tmp_path, each(tmp_path), ckpt_path=path)


def test_what_is_only_for_fit_or_needs_a_callback(tmp_path, words):
    with pytest.raises(ValueError, match="'auto' is for fit only, because it may start from scratch"):
        made(tmp_path, each(tmp_path)).validate(Tiny(), loader(4), ckpt_path="auto")
    for word in ("last", "best", "auto"):
        with pytest.raises(ValueError, match=f"ckpt_path='{word}'.* has no ModelCheckpoint"):
            fit(tmp_path, ckpt_path=word)
    fit(tmp_path, each(tmp_path), ckpt_path="auto", fast_dev_run=True)
    assert [text for text in words.messages if "fast_dev_run" in text]


def test_a_directory_of_that_name_is_meant_by_a_path(tmp_path, monkeypatch):
    own, _ = fit(tmp_path, each(tmp_path), max_epochs=1)
    own.save_checkpoint(tmp_path / "last")
    monkeypatch.chdir(tmp_path)
    assert fit(tmp_path, each(tmp_path), ckpt_path=Path("last"))[1] == 5
    assert fit(tmp_path, each(tmp_path), ckpt_path="./last")[1] == 5


# -- several processes ---------------------------------------------------------------------------------------------


def validate_then_fit(root):
    return two(root, "best", "validate"), two(root, "last", "validate"), two(root, "last")


def two(root, word, stage="fit"):
    root = Path(root)
    rank = int(os.environ["RANK"])
    kept = each(root if rank == 0 else root / "elsewhere")
    own = made(root, kept, strategy="ddp")
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            getattr(own, stage)(Tiny(), loader(20), ckpt_path=word)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error)
    return str(own.ckpt_path), sum("skips a checkpoint" in str(w.message) for w in caught)


@pytest.mark.long
def test_all_processes_get_rank_zeros_answer(tmp_path):
    (first, *zero), (second, *one) = run(validate_then_fit, 2, str(tmp_path))
    assert first[0] == "ValueError"
    assert second[0] == "PeerFailed"
    assert "rank 0 failed: ValueError: ckpt_path='best': validate was called without a fit" in second[1]
    assert zero == one == [("None", 0)] * 2
    flip(tmp_path / "c" / "step=10.ckpt")
    found = str(tmp_path / "c" / "step=8.ckpt")
    assert run(two, 2, str(tmp_path), "auto") == [(found, 1), (found, 0)]
