"""Plain spellings become structured ops: rules whose ``after`` is made of plain ops."""

from metainfer.ir.graph import Module
from metainfer.passes.rewrite import apply_rules, load_rules
from metainfer.passes.target import Target
from metainfer.passes.transpose_weights import transpose_weights


def raise_ops(module: Module, target: Target) -> Module:
    """Replace what a model spells out by the op that it means, by the algebraic rules.

    Weights stored [in, out] are turned first. Runs before `canonicalize`, since merged duplicates
    tie spellings together.

    Before::

        graph f(%x: f32[T,8], @w: f32[8]) {
          %0 = mul(%x, %x) : f32[T,8]
          %1 = mean(%0) {dims = (1,), keep = true} : f32[T,1]
          %2 = full() {dtype = "f32", shape = (), value = 1e-05} : f32[]
          %3 = add(%1, %2) : f32[T,1]
          %4 = rsqrt(%3) : f32[T,1]
          %5 = mul(%x, %4) : f32[T,8]
          %6 = mul(@w, %5) : f32[T,8]
          return %6
        }

    After::

        graph f(%x: f32[T,8], @w: f32[8]) {
          %0 = rms_norm(%x, @w) {eps = 1e-05} : f32[T,8]
          return %0
        }
    """
    rules = [rule for rule in load_rules() if rule.fused is None]
    return apply_rules(transpose_weights(module), target, rules, "raise")
