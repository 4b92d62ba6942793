"""What `treadle fit`, `plan` and `runs` do; each module is imported when its command is asked for."""
