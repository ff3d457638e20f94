"""A fuzzer of programs: random models, and oracles that say what a simulation of them has to compute. See README.md."""
