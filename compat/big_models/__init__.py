"""Functions that libraries built on Accelerate use for models larger than one device's memory."""
