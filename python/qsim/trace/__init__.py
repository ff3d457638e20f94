"""A simulation as one traced graph, its marks, and what runtimes can express of it."""
