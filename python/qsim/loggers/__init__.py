"""Where scalars and histograms are logged to: TensorBoard, and whatever takes a dict. Knows nothing of what they are."""
