"""Running a model: its arguments out of batches, snapshots, hooks, sharding, memory."""
