"""Execute: make containers follow a plan."""
