"""Triton kernels: emitted pointwise groups and hand-written templates, for GPUs.

| module | holds |
|---|---|
| launch | a launch as a value; how the runtime runs a kernel's launches |
| interpreter | Triton's interpreter on CPU tensors, and what is repaired in it |
| cross | compiling a launch for a card that is not here: registers, spills, shared memory |
| fits | the constraint that a kernel's launches fit into a card, asked of the compiler |
| records | the records of all kernels |

Modules that hold ``@triton.jit`` functions are imported when the first of them is launched or
compiled, so that listing kernels needs no Triton.
"""
