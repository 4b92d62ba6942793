"""The articles' code samples as Treadle scripts: changed only where they did not run, or did not do what they said.

Each is a whole script that prints JSON lines on rank zero; `processes` is how many run it. FOLDER is given to it.
"""

# S10: data made at random is seeded first; the loss is the whole dataset's.
FIRST_STEPS = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

set_seed(0)
accelerator = Accelerator()
X, y = torch.randn(100, 10), torch.randn(100, 1)
train_dataloader = DataLoader(TensorDataset(X, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.MSELoss(reduction="none")
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in range(2):
    losses = []
    for inputs, targets in train_dataloader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        accelerator.backward(loss.mean())
        optimizer.step()
        losses.append(accelerator.gather_for_metrics(loss))
    accelerator.print(json.dumps(torch.cat(losses).mean().item()))
"""

# S23: half precision on whatever device there is.
HALF_PRECISION = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

set_seed(1)
accelerator = Accelerator(mixed_precision="fp16")
features, labels = torch.randn(112, 20), torch.randint(0, 2, (112,))
loader = DataLoader(TensorDataset(features, labels), batch_size=8 // accelerator.num_processes)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
total_loss, formats = 0.0, set()
for inputs, targets in loader:
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), targets)
    accelerator.backward(loss)
    optimizer.step()
    formats.add(str(outputs.dtype))
    total_loss += accelerator.reduce(loss.detach(), "mean").item()
print_formats = [sorted(formats), accelerator.mixed_precision, accelerator.scaler is not None]
accelerator.print(json.dumps([total_loss, print_formats]))
"""

# S38: one seed for all; a tracker that is started; state saved by all.
TEMPLATE = """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from treadle import Accelerator
from treadle.utils import set_seed, tqdm

def main():
    accelerator = Accelerator(gradient_accumulation_steps=4, log_with="csv", project_dir=FOLDER)
    accelerator.init_trackers("template", config={"lr": 1e-2})
    set_seed(42)
    x = torch.randn(90, 4)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    train, val = random_split(dataset, [70, 20])
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch_size = 4 // accelerator.num_processes
    model, optimizer, loader, val_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size))
    step = 0
    for epoch in range(2):
        model.train()
        for inputs, targets in tqdm(loader, disable=True):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=step)
    accelerator.save_state(os.path.join(FOLDER, "state"))
    seen = []
    for inputs, _ in val_loader:
        seen.append(accelerator.gather_for_metrics(inputs))
    weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
    accelerator.end_training()
    accelerator.print(json.dumps([step, len(torch.cat(seen)), torch.cat(seen).sum().item(), weights.tolist()]))

if __name__ == "__main__":
    main()
"""

# S46: a loader shares the prompts out; results come back in their order. (A model too big for one device goes through
# `load_checkpoint_and_dispatch` in one process instead.)
GENERATE = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader
import treadle as tl

class Generator(tl.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Embedding.from_pretrained(torch.eye(128).roll(1, dims=1))

    def predict_step(self, batch, batch_idx):  # the next letter of the alphabet, for each letter
        with torch.inference_mode():
            tokens = [torch.tensor([ord(letter) for letter in prompt]) for prompt in batch]
            return ["".join(chr(i) for i in self.net(each).argmax(1).tolist()) for each in tokens]

prompts = ["a", "bc", "def", "ghij", "klmno"]
trainer = tl.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
batches = trainer.predict(Generator(), DataLoader(prompts, batch_size=2))
trainer.print(json.dumps([text for batch in batches for text in batch]))
"""

# S57: the loss as it is; whoever accumulates scales it, once. And the step is taken.
ACCUMULATE = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader
from treadle import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(torch.ones(10, 1), batch_size=2 // accelerator.num_processes)  # 5 global batches: 4 and 1
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
gradients = []
for inputs in loader:
    with accelerator.accumulate(model):
        loss = model(inputs).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            gradients.append(next(model.parameters()).grad.item())
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(json.dumps(gradients))
"""

# S63: saved by all processes, in the middle of an epoch; a second Accelerator goes on.
SAVE = """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

def train(stop=None, resume=False):
    set_seed(3)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = TensorDataset(torch.randn(48, 4))
    loader = DataLoader(dataset, batch_size=8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(os.path.join(FOLDER, "middle"))
    steps = 0
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == stop:
            accelerator.wait_for_everyone()
            accelerator.save_state(os.path.join(FOLDER, "middle"))
            accelerator.wait_for_everyone()
            return None
    weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
    return [steps, weights.tolist()]

whole = train()
train(stop=2)
Accelerator().print(json.dumps([whole, train(resume=True)]))
"""

# S64: every process evaluates its share; shuffled and with BatchNorm, as that was what hung.
EVALUATE = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

set_seed(5)
accelerator = Accelerator()
x = torch.randn(15, 4)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
loader = DataLoader(TensorDataset(x, torch.arange(15)), batch_size=4 // accelerator.num_processes, shuffle=True)
model, eval_loader = accelerator.prepare(model, loader)
model.eval()
seen, outputs = [], []
accelerator.wait_for_everyone()
for inputs, indices in eval_loader:
    with torch.no_grad():
        results = accelerator.gather_for_metrics((model(inputs), indices))
    outputs.append(results[0])
    seen += results[1].tolist()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    with torch.no_grad():
        alone = accelerator.unwrap_model(model)(x)[seen]
    print(json.dumps([sorted(seen), torch.allclose(torch.cat(outputs), alone, atol=1e-6)]))
"""

# S77: objects are gathered on all processes; of padded results the first are those of the inputs.
PROMPTS = """
import json
import torch
from treadle import PartialState
from treadle.utils import gather_object

state = PartialState(cpu=True)
prompts = ["one", "two", "three", "four", "five"]
def generate(texts):
    return [text.upper() for text in texts]
with torch.inference_mode():
    with state.split_between_processes(prompts, apply_padding=True) as share:
        padded = gather_object(generate(share))
    with state.split_between_processes(prompts) as share:
        exact = gather_object(generate(share))
if state.is_main_process:
    print(json.dumps([len(padded), padded[:len(prompts)], exact]))
"""

# S84: the second stage has an Accelerator, a strategy and an optimizer of its own.
STAGES = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

set_seed(7)
body, head = nn.Linear(4, 8), nn.Linear(8, 1)
net = nn.Sequential(body, nn.Tanh(), head)
dataset = TensorDataset(torch.randn(32, 4))
start = body.weight.detach().clone()
found = []
for strategy in ("auto", "fsdp"):
    accelerator = Accelerator(strategy=strategy)
    body.requires_grad_(strategy == "fsdp")
    loader = DataLoader(dataset, batch_size=8 // accelerator.num_processes)
    model = accelerator.prepare(net)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    found += [[accelerator.strategy.name, accelerator.is_main_process and weights["0.weight"].tolist()]]
    accelerator.end_training()
    accelerator.destroy_process_group()
Accelerator().print(json.dumps([start.tolist(), found]))
"""

# S85: what belongs to an experiment is built in it.
EXPERIMENTS = """
import gc, json, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

def experiment(lr, mixed_precision):
    accelerator = Accelerator(mixed_precision=mixed_precision)
    set_seed(9)
    model = nn.Linear(4, 1)
    known.append(weakref.ref(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    accelerator.end_training()
    accelerator.destroy_process_group()
    return weights

known, found = [], []
for lr, mixed_precision in [(0.1, "no"), (0.2, "no"), (0.1, "bf16"), (0.3, "no"), (0.1, "no")]:
    found.append(experiment(lr, mixed_precision))
gc.collect()
Accelerator().print(json.dumps([found, sum(model() is not None for model in known)]))
"""

SAMPLES = {
    "S10": FIRST_STEPS,
    "S23": HALF_PRECISION,
    "S38": TEMPLATE,
    "S46": GENERATE,
    "S57": ACCUMULATE,
    "S63": SAVE,
    "S64": EVALUATE,
    "S77": PROMPTS,
    "S84": STAGES,
    "S85": EXPERIMENTS,
}
