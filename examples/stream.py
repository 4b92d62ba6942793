"""Train on a stream of text that is split by rank, and resume it where it stopped.

    python examples/stream.py
    torchrun --nproc-per-node 2 examples/stream.py     each process reads its own files

Nothing is read twice, because the stream has a state. Without one, a resumed run reads it again up to its position.
"""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import treadle as tl


class Windows(IterableDataset):  # of 65 bytes of the standard library's source text
    def __init__(self, rank: int, world_size: int) -> None:
        self.files = sorted(Path(os.__file__).parent.glob("*.py"))[rank::world_size]
        self.file = self.start = self.reads = 0

    def __iter__(self):
        while self.file < len(self.files):
            data = self.files[self.file].read_bytes()
            while self.start + 65 <= len(data):
                self.start, self.reads = self.start + 65, self.reads + 1
                yield torch.tensor(list(data[self.start - 65 : self.start]))
            self.file, self.start = self.file + 1, 0
        self.file = 0

    def state_dict(self) -> dict[str, int]:  # kept by checkpoints
        return {"file": self.file, "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.file, self.start = state["file"], state["start"]


class Bigrams(tl.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.trainer.global_rank, self.trainer.world_size), batch_size=32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


for steps, ckpt_path in ((60, None), (120, "last")):
    trainer = tl.Trainer(max_steps=steps, max_epochs=-1, logger=False, default_root_dir="runs/streaming")
    trainer.fit(Bigrams(), ckpt_path=ckpt_path)
    windows = trainer.train_dataloader.dataset.reads
    trainer.print(f"step {trainer.global_step}: {windows:,} windows read by this run")
