"""Everything that runs on a GPU host. Standard library plus optional pynvml; Python 3.9 and later."""
