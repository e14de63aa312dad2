"""Capture, cost model, pipeline driver, plan writing, explain."""
