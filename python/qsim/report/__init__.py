"""Reports as HTML: one file each, which loads nothing and lets nothing else run."""
