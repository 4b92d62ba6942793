"""Words that stand for a checkpoint in the run's own folder. Nothing here waits for torch."""

WORDS_FOR_CHECKPOINTS = ("last", "best", "auto")
