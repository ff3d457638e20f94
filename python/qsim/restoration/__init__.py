"""Accuracy won back after calibration, without labels: weights solved layer by layer, biases corrected, ranges searched, distillation."""
