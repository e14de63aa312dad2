"""Ops that belong together become groups, which carry what they stand for as their body."""

from metainfer.ir.graph import Module
from metainfer.passes.rewrite import apply_rules, load_rules
from metainfer.passes.target import Target


def fuse(module: Module, target: Target) -> Module:
    """Form fused groups by all rules; each line of the report says what they save.

    Algebraic rules run again, since merged linears and seams bring ops together.

    Before::

        graph f(%x: f32[T,8], %r: f32[T,8], @w: f32[8]) {
          %0 = add(%x, %r) : f32[T,8]
          %1 = rms_norm(%0, @w) {eps = 1e-05} : f32[T,8]
          return %0, %1
        }

    After::

        graph f(%x: f32[T,8], %r: f32[T,8], @w: f32[8]) {
          %0, %1 = fused[add_rms_norm](%x, %r, @w) {eps = 1e-05} : f32[T,8], f32[T,8]
            body (%x: f32[T,8], %r: f32[T,8], @w: f32[8]) {
              %0 = add(%x, %r) : f32[T,8]
              %1 = rms_norm(%0, @w) {eps = 1e-05} : f32[T,8]
              return %0, %1
            }
          return %0, %1
        }
    """
    return apply_rules(module, target, load_rules(), "fuse")
