"""The simulation: a model that was recorded, planned and attached to its quantizers."""
