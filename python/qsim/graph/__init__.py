"""How a model is seen (record), what is decided about it (plan) and how that is carried out (execute)."""
