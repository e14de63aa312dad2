"""Emitter of Triton source for pointwise groups and reductions over rows, from a group's body.

| module | holds |
|---|---|
| index | where in a tensor a tile lies, and how views change that |
| formulas | Triton text of each elementwise op |
| rows | ops that read more than one element: norms, sums, top-k, rotary pairs, row look-ups |
| tiles | the nouns: tiles, stores, arguments |
| body | one group: loads, ops and stores of its tiles |
| source | the whole function as text, and as something that Triton can compile |
"""
