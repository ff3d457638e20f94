"""From a simulation to what runtimes load: the traced graph, and the files made of it."""
