"""What helps to test a training: `treadle.testing.faults` makes it fail at places that are planned."""
