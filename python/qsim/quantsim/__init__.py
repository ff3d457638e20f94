"""The face: `QuantSim`, one module a topic."""
