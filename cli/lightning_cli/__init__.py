"""LightningCLI: a command line built from the arguments of classes by jsonargparse."""
