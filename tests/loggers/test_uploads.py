"""Checkpoints that are uploaded to a tracking service."""

from types import SimpleNamespace

import pytest
from treadle.loggers.service_logger import Uploads


def saved_to(path):
    settings = dict.fromkeys(("monitor", "mode", "save_last", "save_weights_only", "every_n_train_steps"))
    return SimpleNamespace(
        **settings,
        save_top_k=-1,
        last_model_path="",
        current_score=None,
        best_model_path=path,
        best_model_score=0.5,
        best_k_models={path: 0.5},
    )


def test_checkpoints_in_an_object_store_are_named_once():
    uploads, callback = Uploads(True), saved_to("s3://bucket/run/epoch=1.ckpt")
    with pytest.warns(UserWarning, match="those in s3://bucket/run are not uploaded") as caught:
        uploaded = [list(uploads.collect_after_save(callback)) for _ in range(2)]
    assert (uploaded, len(caught)) == ([[], []], 1)


def test_each_version_of_a_checkpoint_is_uploaded_once(tmp_path):
    path = tmp_path / "best.ckpt"
    path.mkdir()
    uploads, callback = Uploads(True), saved_to(str(path))
    assert [found for found, _, _ in uploads.collect_after_save(callback)] == [str(path)]
    assert list(uploads.collect_after_save(callback)) == []
