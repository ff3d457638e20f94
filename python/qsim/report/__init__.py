"""Reports: what a simulation is and loses; each also as one HTML file, which loads nothing and lets nothing else run."""
