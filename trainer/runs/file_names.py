"""Names of the files in a run's folder, for writers and readers."""

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ENVIRONMENT = "environment.json"
RECORD = "run.json"
CURVES = "curves.json"
ERROR = "error.json"
LOCK = "lock"
DESCRIPTIONS = (CONFIG, ENVIRONMENT, RECORD, CURVES, ERROR)  # descriptions of the run; the other files are its results
