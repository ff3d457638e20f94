"""What training needs: BatchNorm, gradients, groups of parameters, schedules, the watch."""
