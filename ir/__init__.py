"""The language of metainfer and its artefacts: types, graphs, ops, text, verifier, interpreter."""
