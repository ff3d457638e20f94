"""An HTML page, its markup and drawings. Knows no report."""
