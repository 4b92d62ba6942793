"""Every place that casts tensors leaves those alone that torch's `.double()` and `.half()` leave alone."""

import tempfile
import warnings

import pytest
import torch
import torchmetrics
from support.models import SGDTask, loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.callbacks import WeightAveraging
from treadle.compat.precision_plugins import HalfPrecision
from treadle.compat.utils import set_module_tensor_to_device
from treadle.engine.big_models import load_checkpoint_and_dispatch
from treadle.engine.quantization import WeightQuantizer
from treadle.strategies import DDP, FSDP, Precision

import treadle

STORAGE = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16, "32-true": torch.float32}
COMPLEX = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))


class Waves(nn.Module):
    """A complex layer, the gradient of whose imaginary part is minus the sum of the inputs."""

    def __init__(self):
        super().__init__()
        self.amplitude = nn.Parameter(COMPLEX.clone())

    def forward(self, x):
        return -(self.amplitude * x.to(torch.promote_types(x.dtype, torch.float32))).imag.sum(-1, keepdim=True)


class Net(SGDTask):
    lr = 0.5

    def __init__(self):
        super().__init__()
        self.waves = Waves()
        self.linear = nn.Linear(2, 1)
        self.mean = torchmetrics.MeanMetric()
        for name, value in tensors().items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.linear(x.to(self.linear.weight.dtype)).float() + self.waves(x).float()

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()


def tensors():
    return {
        "complex": COMPLEX.clone(),
        "integer": torch.tensor([3]),
        "flag": torch.tensor([True]),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
    }


def by_trainer(precision, task, **flags):
    make_trainer(precision=precision, **flags).fit(task, loader(2))
    return task


def by_accelerator(precision, task, strategy="auto"):
    accelerator = treadle.Accelerator(cpu=True, mixed_precision=precision, strategy=strategy)
    return accelerator.unwrap_model(accelerator.prepare_model(task))


def by_fabric(precision, task):
    return treadle.compat.Fabric(accelerator="cpu", devices=1, precision=precision).setup(task).module


def by_average(precision, task):
    return by_trainer(precision, task, callbacks=[WeightAveraging()], default_root_dir=tempfile.mkdtemp())


def by_offload(precision, task):
    file = f"{tempfile.mkdtemp()}/weights.pt"
    torch.save(task.state_dict(), file)
    return load_checkpoint_and_dispatch(Net(), file, device_map={"": "cpu"}, dtype=STORAGE[precision])


WAYS = [by_trainer, by_accelerator, by_fabric, by_average, by_offload]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["64-true", "16-true", "bf16-true"])
def test_a_module_is_cast_as_by_torch(way, precision):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns of the lost imaginary part
        warnings.filterwarnings("ignore", ".*(precision|contains only weights|loaders).*")
        task = way(precision, Net())
    expected = Net()._apply(lambda t: t.to(STORAGE[precision]) if t.is_floating_point() else t).state_dict()
    found = task.state_dict()
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
    assert torch.equal(found["complex"], COMPLEX)
    steps = 1 if way in (by_trainer, by_average) else 0
    assert torch.equal(found["waves.amplitude"], COMPLEX + 0.5j * steps)
    assert task.mean.mean_value.dtype == torch.float32  # torchmetrics leaves its state to `set_dtype`


@pytest.mark.parametrize("precision", list(STORAGE))
def test_a_batch_is_cast_as_by_torch(precision):
    storage = STORAGE[precision]
    batch = {**tensors(), "float": torch.ones(1), "sparse": torch.eye(2).to_sparse(), "text": "a"}
    batch["quantized"] = torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)
    batch["subclass"] = torch.ones(1).as_subclass(Marked)
    found = Precision(name="own", storage=storage).cast(batch)
    for name in ("complex", "integer", "flag", "quantized", "text"):
        assert found[name] is batch[name]
    assert {found[name].dtype for name in ("float", "float8", "sparse", "subclass")} == {storage}
    assert type(found["subclass"]) is Marked
    assert found["sparse"].is_sparse


class Marked(torch.Tensor):
    pass


def test_other_casts_leave_complex_tensors_alone():
    net = Net()
    set_module_tensor_to_device(net, "complex", "cpu", value=COMPLEX, dtype=torch.float16)
    assert torch.equal(net.complex, COMPLEX)
    assert HalfPrecision("16-true").convert_module(Net()).complex.dtype == torch.complex64
    layers = nn.ModuleDict({"complex": nn.Linear(32, 32, dtype=torch.complex64), "real": nn.Linear(32, 32)})
    assert list(WeightQuantizer("int8").select(layers)) == ["real"]


def test_float8_buffers_are_averaged():
    task = by_average("32-true", Net())
    assert torch.equal(task.float8.float(), torch.ones(2))


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0)])
def test_weighted_complex_gradients(weight):
    accelerator = treadle.Accelerator(cpu=True)
    model = Waves()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(torch.ones(1, 2)).mean(), weight=weight)
        optimizer.step()
    assert torch.equal(model.amplitude, COMPLEX + 0.5j)


def test_float16_on_the_cpu_is_that_of_a_gpu():
    class Seen(Net):
        def training_step(self, batch, batch_idx):
            self.computed = self.linear(batch[0]).dtype
            return self.linear(batch[0]).mean()

    task = Seen()
    del task.waves  # a loss scaler supports no complex gradients
    by_trainer("16-mixed", task)
    assert task.computed == torch.float16
    assert task.trainer.scaler is not None


STRATEGIES = {
    "ddp": lambda: DDP(),
    "fp16": lambda: DDP(comm_hook="fp16"),
    "bf16": lambda: DDP(comm_hook="bf16"),
    "power_sgd": lambda: DDP(comm_hook="power_sgd"),
    "fsdp": lambda: FSDP(auto_wrap_policy=[Waves]),
    "gather": lambda: FSDP(auto_wrap_policy=[Waves], gather_dtype=torch.bfloat16),
    "bf16-true": lambda: FSDP(auto_wrap_policy=[Waves]),
}


def train(name):
    precision = name if "true" in name else "no"
    accelerator = treadle.Accelerator(cpu=True, strategy=STRATEGIES[name](), mixed_precision=precision)
    net = Net()
    del net.float8  # gloo does not send it
    model = accelerator.prepare_model(net)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5))
    for _ in range(2):
        accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index)).sum())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.strategy.optimizer_state(optimizer.optimizer)["state"]
    buffers = [slots["momentum_buffer"] for slots in state.values()]
    momentum = [value for value in buffers if value.is_complex() and not hasattr(value, "device_mesh")]
    return accelerator.get_state_dict(model)["waves.amplitude"], momentum


def train_all():
    names = list(STRATEGIES)
    if torch.__version__ < "2.13":  # which casts complex parameters to the dtype in which real ones are gathered
        names.remove("gather")
        with pytest.raises(ValueError, match="would drop the imaginary part of complex parameters, as in Waves"):
            train("gather")
    return {name: train(name) for name in names}


@pytest.mark.long
def test_complex_gradients_are_reduced_whole_on_two_processes():
    """The mean gradient of the imaginary part is -1.5: steps of 0.75 and 0.75 * 1.5."""
    first, second = run(train_all, 2)
    for name in first:
        for amplitude, momentum in (first[name], second[name]):
            if amplitude is not None:  # a sharded model's state is collected on rank zero
                assert torch.allclose(amplitude, COMPLEX + 1.875j), name
            assert all(torch.allclose(value, torch.full_like(value, -2.25j)) for value in momentum), name
