"""What a user configures: overrides, target profiles, configs, presets, AIMET's files, the float plan."""
