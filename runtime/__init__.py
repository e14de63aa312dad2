"""Loads and executes plans."""
