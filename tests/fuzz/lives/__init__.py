"""Random sequences of public calls on a simulation, and what must hold after each."""
