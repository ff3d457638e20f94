"""What training needs: gradient clipping, groups of parameters, schedules, the watch, the monitor."""
