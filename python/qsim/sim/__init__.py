"""`QuantSim`: the simulation and what is done with it, one module for each topic."""
