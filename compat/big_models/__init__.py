"""What libraries built on Accelerate use of models that are larger than one device: tensors, files, hooks."""
