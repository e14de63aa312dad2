"""The command line: one file a verb, nothing of torch imported before a verb needs it."""
