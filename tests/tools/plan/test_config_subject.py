"""The plan of a configuration is that of its run: steps, checkpoints, machines."""

import pytest
from support.collective_counts import CountedCollectives
from support.planned_runs import plan
from support.processes import run
from support.trainers import make_trainer
from treadle.tools.plan.command import build_parser
from treadle.tools.plan.config_subject import build_config_subject
from treadle.tools.plan.simulation import simulate


@pytest.mark.parametrize("schedule", ["none", "plateau", "steps", "stream"])
def test_a_task_that_is_finished_by_the_run(here, capsys, schedule):
    (here / "run.yaml").write_text(
        "trainer: {max_epochs: 2, strategy: fsdp, devices: 2}\nmodel: {class: planned_task.Late, schedule: none}"
    )
    status, out, err = plan(capsys, "--no-advice", f"model.schedule={schedule}")
    assert status == 0, err
    assert "90, all trained" in out  # 8 to 4 x 2 processes, and those to 2 epochs, with biases
    later = {"none": "throughout", "plateau": "at first, then ReduceLROnPlateau on loss"}
    assert f"learning rate 0.1 {later.get(schedule, 'at first, then StepLR')}" in out
    assert ("number unknown" in out) == (schedule == "stream")


def test_a_run_that_fails_is_no_run_that_does_not_fit(here, capsys):
    status, _, err = plan(capsys, "model.class=planned_task.Broken")
    assert status == 2
    assert "planned_task.py" in err
    assert "no attribute 'missing'" in err


def planned(*arguments):
    """The plan and the schedule of the run."""
    subject = build_config_subject(build_parser().parse_args(["--config", "run.yaml", *arguments]))
    settings = subject.settings
    made = simulate(
        subject.build_model, subject.make_batch, subject.loss, subject.optimizer,
        strategy=subject.strategy(settings["world_size"]), step=subject.step, **settings,
    )  # fmt: skip
    return made, subject.schedule(made)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form", "flags"),
    [
        ("Task", "plain", {}),
        pytest.param("Task", "dropped", {}, marks=pytest.mark.exhaustive),
        pytest.param("Task", "sampled", {"max_steps": 9}, marks=pytest.mark.exhaustive),
        pytest.param("Task", "own batches", {}, marks=pytest.mark.exhaustive),
        pytest.param("Task", "list", {"limit_train_batches": 5}, marks=pytest.mark.exhaustive),
        *(
            pytest.param("Task", "plain", flag, marks=pytest.mark.exhaustive)
            for flag in ({"limit_train_batches": 0.3}, {"overfit_batches": 7}, {"fast_dev_run": 3})
        ),
        ("Pair", "plain", {}),
    ],
)
def test_steps_are_those_of_the_real_run(here, name, form, flags):
    import planned_task

    given = [f"trainer.{flag}={value}" for flag, value in flags.items()]
    _, schedule = planned("trainer.strategy=single", "trainer.devices=1", f"model.class=planned_task.{name}",
                          f"model.form={form}", *given)  # fmt: skip
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=2, enable_report=False, **flags)
    trainer.fit(getattr(planned_task, name)(width=12, form=form))
    assert schedule.steps == trainer.global_step
    assert schedule.per_epoch == -(-trainer.num_training_batches // 2)


def test_a_checkpoint_has_the_bytes_of_a_real_one(here):
    import planned_task

    made, _ = planned("trainer.strategy=single", "trainer.devices=1", "model.width=64")
    trainer = make_trainer(max_steps=1, enable_report=False)
    trainer.fit(planned_task.Task(width=64))
    trainer.save_checkpoint("saved")
    written = (here / "saved").stat().st_size
    assert made.checkpoint <= written < made.checkpoint + 80_000  # what is saved beside: names, random states


def test_micro_batches_of_all_processes_and_their_sums(here, capsys):
    flags = ("trainer.strategy=ddp", "trainer.devices=2")
    ordinary, expected = planned(*flags, "trainer.accumulate_grad_batches=4")
    divided, schedule = planned(*flags, "trainer.accumulate_grad_batches=1", "trainer.step_micro_batches=8")
    assert (divided.accumulate, divided.samples) == (4, ordinary.samples)
    assert (schedule.steps, schedule.per_epoch) == (expected.steps, expected.per_epoch)
    assert divided.peak == ordinary.peak + 2 * 4 * ordinary.trainable  # in float32
    status, _, error = plan(capsys, *flags, "--accumulate", "2", "trainer.step_micro_batches=8")
    assert status
    assert "--accumulate 2 contradicts step_micro_batches=8" in error


@pytest.mark.long
def test_machines_are_those_of_the_configuration(here, capsys):
    _, out, _ = plan(capsys, "--no-advice", "trainer.num_nodes=3")
    assert "on 6 x h100 (3 machines)" in out
    _, out, _ = plan(capsys, "--no-advice", "--world-size", "8", "--per-machine", "4", "trainer.compile=true")
    assert "on 8 x h100 (2 machines), fsdp, 32-true, compiled" in out
    assert "assumed" in out
    _, out, _ = plan(capsys, "--no-advice", "--gpu", "a100")
    assert "assumed" not in out


def sent_in_a_run():
    """What one process of the real run sends in its second step."""
    import planned_task

    import treadle

    written = CountedCollectives()

    class Watch(treadle.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            if batch_idx == 2:
                written.__enter__()

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if batch_idx == 3:
                written.__exit__(None, None, None)

    flags = {"strategy": "fsdp", "devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    trainer = make_trainer(callbacks=[Watch()], **flags)
    trainer.fit(planned_task.Task(width=12))
    return dict(written.found), trainer.global_step


@pytest.mark.long
def test_the_exchange_is_that_of_the_real_run(here):
    made, schedule = planned()
    sizes = {f"{kind} bytes": number for kind, number in made.traffic.size.items()}
    sent, steps = run(sent_in_a_run, 2)[0]
    assert sent == {**made.traffic.count, **sizes}
    assert schedule.per_epoch == steps
