"""Record: a model run once, as a tape of calls."""
