"""Small recurrent language model on WikiText-2, equivalent to Lightning's demo."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from ...trainer import TaskModule
from .transformer import WikiText2

__all__ = ["LightningLSTM", "SequenceSampler", "SimpleLSTM"]

Hidden = tuple[Tensor, Tensor]


class SimpleLSTM(nn.Module):
    """Language model that consists of an embedding, an LSTM and a linear layer."""

    def __init__(
        self, vocab_size: int = 33278, ninp: int = 512, nhid: int = 512, nlayers: int = 4, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.vocab_size, self.nlayers, self.nhid = vocab_size, nlayers, nhid
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        self.init_weights()

    def init_weights(self) -> None:
        """Reinitialize the weights of the embedding and the linear layer."""
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return log-probabilities, shape ``(batch * length, vocab_size)``, and the new hidden and cell states.

        Args:
            input: Word indices, shape ``(batch, length)``.
            hidden: Hidden state and cell state, each of shape ``(nlayers, batch, nhid)``.
        """
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        scores = self.decoder(self.drop(output)).view(-1, self.vocab_size)
        return nn.functional.log_softmax(scores, dim=1), hidden

    def init_hidden(self, batch_size: int) -> Hidden:
        """Return the hidden state and cell state at the start of a text, which are zeros."""
        weight = self.decoder.weight
        shape = (self.nlayers, batch_size, self.nhid)
        return weight.new_zeros(shape), weight.new_zeros(shape)


class SequenceSampler(Sampler[list[int]]):
    """Batch sampler in which the i-th samples of successive batches follow each other in the dataset."""

    def __init__(self, dataset: Sized, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size
        self.chunk_size = len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        end = len(self.dataset) - len(self.dataset) % self.batch_size
        return (list(range(start, end, self.chunk_size)) for start in range(self.chunk_size))

    def __len__(self) -> int:
        return self.chunk_size


class LightningLSTM(TaskModule):
    """Task that trains a `SimpleLSTM`, and passes the hidden state from batch to batch within an epoch."""

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: Hidden | None = None

    def on_train_epoch_end(self) -> None:
        """Reset the hidden state."""
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the negative log-likelihood of the next words."""
        inputs, target = batch
        if self.hidden is None:
            self.hidden = self.model.init_hidden(inputs.size(0))
        first, second = self.hidden
        output, self.hidden = self.model(inputs, (first.detach(), second.detach()))
        loss = nn.functional.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def prepare_data(self) -> None:
        """Download WikiText-2's training text, unless the file exists."""
        WikiText2(download=True)

    def train_dataloader(self) -> Any:
        """Return a dataloader with batches of 20 blocks."""
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=20))

    def configure_optimizers(self) -> Optimizer:
        """See `TaskModule.configure_optimizers`."""
        return torch.optim.SGD(self.parameters(), lr=20.0)
