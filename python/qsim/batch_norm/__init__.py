"""BatchNorm: where it may be folded, folding, statistics, folding after training."""
