"""Machines as data: schema, units, topology, and the descriptions themselves."""
