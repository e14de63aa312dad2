"""One record per op: infer, reference, flops, bytes, sharding rule."""
