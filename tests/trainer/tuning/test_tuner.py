"""The Tuner by itself."""

from support.searched_runs import check, trace


def test_nothing_is_left_of_a_tuner_alone():
    def search(tuner, task):
        found = tuner.lr_find(task, num_training=20, update_attr=False)
        assert len(found.results["lr"]) == 20
        assert tuner.scale_batch_size(task, init_val=4, max_trials=1) == 4

    check(trace([]), trace([], tuner=search))
