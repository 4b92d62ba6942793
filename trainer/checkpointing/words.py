"""Words that stand for a checkpoint in the run's folder. Importing this file does not import torch."""

WORDS_FOR_CHECKPOINTS = ("last", "best", "auto")
