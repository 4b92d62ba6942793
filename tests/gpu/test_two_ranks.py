"""Two ranks on one GPU, over gloo: nccl refuses two ranks of one device. On the CPU the same two ranks."""

import os

import pytest
import torch
from support.gpus import CUDA, DEVICE, VISIBLE, Net, accelerator, are_equal, loader, needs_gpu, trainer, weights
from support.processes import run
from torch import nn
from torchmetrics import MeanMetric
from treadle.strategies import DDP

import treadle
from treadle.utils import InitProcessGroupKwargs


def open_as_a_machine_of_its_own():
    """Each rank takes the first GPU, as if it were alone on a machine of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE="2")


def open_rank(**options):
    if CUDA:
        open_as_a_machine_of_its_own()
    return accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)


def trained(options, accumulate=1):
    own = open_rank(strategy=DDP(**options), gradient_accumulation_steps=accumulate)
    torch.manual_seed(own.process_index)  # rank zero's weights count
    net = Net()
    model, optimizer, data = own.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), loader(8, 4))
    for x, y in data:
        with own.accumulate(model):
            own.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return weights(own.unwrap_model(model)), str(own.device)


def by_hand():
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    batches, norms = list(loader(8, 4)), []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        x, y = (torch.cat(pair).to(DEVICE) for pair in zip(first, second, strict=True))
        nn.functional.mse_loss(net(x), y).backward()
        norms.append(nn.utils.get_total_norm(p.grad for p in net.parameters()).item())
        optimizer.step()
        optimizer.zero_grad()
    return weights(net), norms


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        pytest.param({"zero": True}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param({"comm_hook": "fp16"}, 5e-3, marks=pytest.mark.exhaustive),
        pytest.param({"comm_hook": "bf16"}, 5e-2, marks=pytest.mark.exhaustive),
        pytest.param({"sync_batchnorm": True}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param({"static_graph": True}, 1e-5, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_two_ranks_train_as_one_process_does(options, tolerance):
    (first, device), (second, _) = run(trained, 2, options, env=VISIBLE)
    assert device == str(DEVICE)
    assert are_equal(first, second)
    for name, value in by_hand()[0].items():
        torch.testing.assert_close(first[name], value, rtol=tolerance, atol=tolerance)


class Manual(treadle.TaskModule):
    """Keeps its optimizer to itself, and clips by torch's own function."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.own = torch.optim.SGD(self.parameters(), lr=0.05)
        self.norms = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.manual_backward(nn.functional.mse_loss(self.net(x), y))
        self.norms.append(nn.utils.clip_grad_norm_(self.parameters(), 1e6).item())
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self):
        return None


def stepped_by_hand():
    open_as_a_machine_of_its_own()
    torch.manual_seed(0)
    task = Manual()
    strategy = DDP(process_group_backend="gloo")
    trainer(strategy=strategy, num_nodes=2, use_distributed_sampler=True).fit(task, loader(8, 4))
    return weights(task.net), task.norms


@pytest.mark.long
def test_gradients_of_manual_steps_are_those_of_the_joint_batch():
    (first, norms), (second, others) = run(stepped_by_hand, 2, env=VISIBLE)
    assert are_equal(first, second)
    assert norms == others
    expected, joint = by_hand()
    assert norms == pytest.approx(joint, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-5)


def exchanged():
    own = open_rank()
    rank, device = own.process_index, own.device
    rows = torch.arange(6.0, device=device).view(2, 3) + 10 * rank
    found = {
        "permuted": own.gather(rows.t()).cpu(),
        "uneven": own.gather_for_metrics(torch.full((rank + 1,), float(rank), device=device)).cpu(),
        "bytes": own.gather(torch.tensor([rank], dtype=torch.int16, device=device)).cpu(),
        "host": own.gather(torch.tensor([rank])),
        "sum": own.reduce(torch.tensor(2.0, device=device)).item(),
    }
    objects = own.gather_object([{"at": torch.full((2,), float(rank), device=device), "rank": rank}])
    return found, [str(item["at"].device) for item in objects], [item["at"].tolist() for item in objects]


@pytest.mark.exhaustive
def test_what_ranks_exchange():
    for found, devices, values in run(exchanged, 2, env=VISIBLE):
        assert found["permuted"][3:].tolist() == [[10, 13], [11, 14], [12, 15]]
        assert found["uneven"].tolist() == [0, 1, 1]
        assert found["bytes"].tolist() == found["host"].tolist() == [0, 1]
        assert found["sum"] == 4.0
        assert set(devices) == {str(DEVICE)}
        assert values == [[0.0, 0.0], [1.0, 1.0]]


def saved(folder):
    own = open_rank()
    net, mean = Net(), MeanMetric().to(own.device)
    model, optimizer = own.prepare(net, torch.optim.AdamW(net.parameters()))
    own.register_for_checkpointing(mean)
    for x, y in own.prepare(loader()):
        loss = nn.functional.mse_loss(model(x), y)
        mean.update(loss.detach())
        own.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    own.save_state(f"{folder}/beside", blocking=False)
    own.finish_saving()
    before = weights(net)
    own.load_state(f"{folder}/beside")
    return are_equal(before, weights(net))


@pytest.mark.exhaustive
def test_a_save_beside_the_training_over_two_ranks(tmp_path):
    assert run(saved, 2, str(tmp_path), env=VISIBLE) == [True, True]


def diverging():
    own = open_rank(on_nonfinite="raise")
    net = Net()
    model, optimizer, data = own.prepare(net, torch.optim.AdamW(net.parameters()), loader())
    steps = 0
    try:
        for number, (x, y) in enumerate(data):
            loss = nn.functional.mse_loss(model(x), y)
            if number == 1 and own.process_index == 1:
                loss = loss * float("nan")
            own.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        own.end_training()
    except (ValueError, RuntimeError) as error:
        return steps, str(error), all(torch.isfinite(p).all() for p in net.parameters())
    return None


@pytest.mark.exhaustive
def test_a_loss_that_is_not_finite_on_one_rank_ends_both():
    (first, said, whole), (second, _, other_whole) = run(diverging, 2, env=VISIBLE)
    assert first == second
    assert "optimizer step 2" in said
    assert whole is other_whole is True


@needs_gpu
def test_two_gpus_are_not_needed_for_nccl_alone():
    """A group that the script itself has made with nccl, in a world of one."""
    assert run(own_group, 1, env=VISIBLE) == [[0.0, 2.0]]


def own_group():
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    own = treadle.Accelerator()
    total = own.reduce(torch.tensor(2.0))
    return [float(own.gather(torch.tensor([0.0]))[0]), total.item()]
