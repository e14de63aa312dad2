"""Graph to graph rewrites; PIPELINE is the order in which they run."""
