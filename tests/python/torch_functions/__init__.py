"""Every function of torch, called as its own list of them has it (`calls.py`), and those that the list lacks (`written.py`)."""
