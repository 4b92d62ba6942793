"""What a run would do and need, found out without its machines."""
