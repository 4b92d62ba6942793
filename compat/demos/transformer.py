"""Small transformer language model on WikiText-2, equivalent to Lightning's demo."""

from __future__ import annotations

import math
import os
import urllib.request
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...common.lazy_exports import lazy_exports

__all__ = ["Dictionary", "PositionalEncoding", "Transformer", "WikiText2", "tokenize"]

_URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"


class Transformer(nn.Module):
    """Language model that consists of embeddings, torch's ``nn.Transformer`` and a linear layer."""

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.ninp, self.vocab_size = ninp, vocab_size
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            d_model=ninp,
            nhead=nhead,
            num_encoder_layers=nlayers,
            num_decoder_layers=nlayers,
            dim_feedforward=nhid,
            dropout=dropout,
            batch_first=True,
        )
        self.decoder = nn.Linear(ninp, vocab_size)

    def generate_square_subsequent_mask(self, size: int) -> Tensor:
        """Return the mask that hides later words: minus infinity above the diagonal, zeros elsewhere."""
        return torch.full((size, size), -math.inf).triu(diagonal=1)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log-probabilities, shape ``(batch * length, vocab_size)``.

        Args:
            inputs: Word indices, shape ``(batch, length)``.
            target: Word indices of the targets, of the same shape.
            mask: Mask of the decoder's self-attention. Default: None, which hides all later words.
        """
        if mask is None:
            mask = self.generate_square_subsequent_mask(inputs.shape[1]).to(inputs.device)
        source, shifted = (self.pos_encoder(self.embedding(words) * math.sqrt(self.ninp)) for words in (inputs, target))
        scores = self.decoder(self.transformer(source, shifted, tgt_mask=mask))
        return nn.functional.log_softmax(scores, dim=-1).view(-1, self.vocab_size)


class PositionalEncoding(nn.Module):
    """Layer that adds a sinusoidal positional encoding (https://arxiv.org/abs/1706.03762) and applies dropout.

    As in Lightning's demo, all positions get the same encoding.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.dim, self.max_len = dim, max_len
        self.pe: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoded embeddings, shape ``(batch, length, dim)``."""
        if self.pe is None:
            self.pe = self._compute_encoding(x.device)
        # Lightning's demo adds the encoding of a single position, the length, to all of them; losses equal its own.
        output: Tensor = self.dropout(x + self.pe[:, x.size(1)])
        return output

    def _compute_encoding(self, device: torch.device) -> Tensor:
        encoding = torch.zeros(self.max_len, self.dim, device=device)
        position = torch.arange(self.max_len, dtype=torch.float, device=device).unsqueeze(1)
        even = torch.arange(0, self.dim, 2, device=device).float()
        angles = position * torch.exp(even * (-math.log(10000.0) / self.dim))
        encoding[:, 0::2], encoding[:, 1::2] = torch.sin(angles), torch.cos(angles)
        return encoding.unsqueeze(0)


class Dictionary:
    """Mapping between words and their indices."""

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """Return the index of a word, which is added if it is new."""
        if word not in self.word2idx:
            self.word2idx[word] = len(self.idx2word)
            self.idx2word.append(word)
        return self.word2idx[word]

    def __len__(self) -> int:
        return len(self.idx2word)


def tokenize(path: Path) -> tuple[Tensor, Dictionary]:
    """Return the word indices of a text file, with ``<eos>`` after each line, and their dictionary."""
    dictionary = Dictionary()
    with open(path, encoding="utf8") as file:
        numbers = [dictionary.add_word(word) for line in file for word in (*line.split(), "<eos>")]
    return torch.tensor(numbers, dtype=torch.int64), dictionary


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Dataset of pairs: a block of WikiText-2's training text, and the same block shifted by one word.

    Args:
        data_dir: Folder of the file ``wikitext-2.txt``. Default: ``./data``.
        block_size: Words per block. Default: 35.
        download: Whether to download the file if it is missing. Default: True.
    """

    def __init__(self, data_dir: Path = Path("./data"), block_size: int = 35, download: bool = True) -> None:
        super().__init__()
        self.path = Path(data_dir) / "wikitext-2.txt"
        if download:
            self.download(self.path)
        self.data, self.dictionary = tokenize(self.path)
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """Number of distinct words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} must be at least 0 and less than the number of blocks, {len(self)}.")
        start = index * self.block_size
        return self.data[start : start + self.block_size], self.data[start + 1 : start + self.block_size + 1]

    @staticmethod
    def download(destination: Path) -> None:
        """Download WikiText-2's training text to a file, unless the file exists."""
        if destination.exists():
            return
        destination.parent.mkdir(parents=True, exist_ok=True)
        part = destination.with_suffix(f".{os.getpid()}")
        urllib.request.urlretrieve(_URL, part)
        part.replace(destination)  # in one operation, because another process may look for the file


__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have
