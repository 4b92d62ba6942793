"""The network of `digits.py`, configured by a file and the command line.

treadle fit --config digits.yaml                                          in this folder
treadle fit --config digits.yaml --config digits_sgd.yaml data.batch_size=32 trainer.devices=2
python digits_cli.py fit trainer.max_epochs=3                             without a file
treadle runs                                                              list the runs and their results
"""

from digits import DigitsTask, build_loaders
from torch.utils.data import DataLoader

import treadle as tl


class DigitsData(tl.DataModule):
    """Images of handwritten digits.

    Args:
        batch_size: Images per process and micro-batch.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.train, self.val, self.test = build_loaders(batch_size)

    def train_dataloader(self) -> DataLoader:
        return self.train

    def val_dataloader(self) -> DataLoader:
        return self.val

    def test_dataloader(self) -> DataLoader:
        return self.test


if __name__ == "__main__":
    tl.cli.run(DigitsTask, DigitsData)
