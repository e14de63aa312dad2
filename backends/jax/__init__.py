"""The structured ops a second time, in JAX: an independent reference."""
