"""Attention whose keys and values are made from one latent a token keeps the latents alone.

A head's key is a product of the latent, ``w_k[h] @ c``, with a rotary key behind it that all heads
share; its value is another, ``w_v[h] @ c``. A score is ``q . (w_k[h] @ c)``, which is
``(w_k[h].T @ q) . c``: the first weight is taken into the query. A weighted sum of values is
``w_v[h] @`` that of the latents: the second is applied to the result. Nothing is left to keep of a
token but its latent and its rotary key, and no head has keys of its own.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from metainfer.ir.dims import dim
from metainfer.ir.entries import KV_FP8, LATENT, ROTARY, entry_fields, is_rounded
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.infer import axis_of, size_of
from metainfer.ir.ops.record import Builder, attr_value
from metainfer.ir.types import StateType, TensorType
from metainfer.passes.prune import prune
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

# T tokens, H heads, C width of a latent, R of a rotary key, N of the rest of a key, V of a value.


def absorb_latents(module: Module, target: Target) -> Module:
    """Rewrite every attention over keys and values that come from one latent.

    Every graph is asked by itself; one whose attention has a window or a softcap is left alone.

    Before::

        graph f(%q: f32[T,4,12], %c: f32[T,16], %r: f32[T,1,4], @w: f32[48,16],
                $kv: pages(k: f32[4,12], v: f32[4,4]) per token) {
          %0 = linear(%c, @w) : f32[T,48]
          %1 = reshape(%0) {shape = (dim(T), 4, 12)} : f32[T,4,12]
          %2 = slice(%1) {dim = 2, start = 0, stop = 8} : f32[T,4,8]
          %3 = slice(%1) {dim = 2, start = 8, stop = 12} : f32[T,4,4]
          %4 = broadcast(%r) {shape = (dim(T), 4, 4)} : f32[T,4,4]
          %5 = concat(%2, %4) {dim = 2} : f32[T,4,12]
          %6 = kv_write($kv, %5, %3, step.slots) : pages(k: f32[4,12], v: f32[4,4]) per token
          %7 = attention(%q, %6, step.starts, step.lengths, step.pages) {scale = 0.5} : f32[T,4,4]
          return %7 states %6
        }

    After::

        module f {
          dim B in [1, 512]
          dim P in [1, 512]
          dim R in [1, 512]
          dim T in [1, 512]
          step
          load main {
            weights {
              @w : f32[48,16]
            }
            %0 = reshape(@w) {shape = (4, 12, 16)} : f32[4,12,16]
            %1 = slice(%0) {dim = 1, start = 0, stop = 8} : f32[4,8,16]
            %2 = slice(%0) {dim = 1, start = 8, stop = 12} : f32[4,4,16]
            return %1, %2
          }
          main(%q: f32[T,4,12], %c: f32[T,16], %r: f32[T,1,4]) {
            weights {
              @w.keys : f32[4,8,16]
              @w.values : f32[4,4,16]
            }
            states {
              $kv : pages(c: f32[16], r: f32[4]) per token
            }
            %0 = reshape(%r) {shape = (dim(T), 4)} : f32[T,4]
            %1 = latent_write($kv, %c, %0, step.slots) : pages(c: f32[16], r: f32[4]) per token
            %2 = slice(%q) {dim = -1, start = 0, stop = 8} : f32[T,4,8]
            %3 = slice(%q) {dim = -1, start = 8, stop = 12} : f32[T,4,4]
            %4 = transpose(%2) {perm = (1, 0, 2)} : f32[4,T,8]
            %5 = matmul(%4, @w.keys) : f32[4,T,16]
            %6 = transpose(%5) {perm = (1, 0, 2)} : f32[T,4,16]
            %7 = latent_attention(%6, %3, %1, step.starts, step.lengths, step.pages)
              {scale = 0.5} : f32[T,4,16]
            %8 = transpose(%7) {perm = (1, 0, 2)} : f32[4,T,16]
            %9 = matmul(%8, @w.values) {transpose_b = true} : f32[4,T,4]
            %10 = transpose(%9) {perm = (1, 0, 2)} : f32[T,4,4]
            return %10 states %1
          }
        }
    """
    for graph in module.graphs:
        found = _Latents.of(graph)
        if found is None:
            continue
        module = _absorbed(module, found)
        target.report.add(_decision(graph, found))
    return module


# --- finding -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """A value [T, H, part] that is a part of every head of ``linear(latent, weight)``.

    Attributes:
        latent: [T, C].
        weight: [H * width, C].
        width: of a head in the weight's rows.
        start: first row of the part, in a head.
        stop: row after the last one.
    """

    latent: Value
    weight: Value
    width: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Latents:
    """An attention over keys and values of latents.

    Attributes:
        write: the kv_write.
        read: the attention.
        keys: the part of a key that comes from the latent.
        values: the values.
        rotary: the part of a key that all heads share, [T, 1, R].
        queries: the same two parts of the query where it is put together from them, else ().
    """

    write: Op
    read: Op
    keys: _Heads
    values: _Heads
    rotary: Value
    queries: tuple[Value, ...]

    @property
    def heads(self) -> int:
        """Query heads, which are the key heads."""
        return self.read.operands[0].tensor.shape[1].static

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """C, R, N and V."""
        rank, rope = (v.tensor.shape[-1].static for v in (self.keys.latent, self.rotary))
        return rank, rope, self.keys.stop - self.keys.start, self.values.stop - self.values.start

    @staticmethod
    def of(graph: Graph) -> "_Latents | None":
        """The one attention of a graph, None if it is of another kind."""
        writes = [op for op in graph.ops if op.name == "kv_write"]
        reads = [op for op in graph.ops if op.name == "attention"]
        if len(writes) != 1 or len(reads) != 1 or len(graph.states) != 1:
            return None
        write, read = writes[0], reads[0]
        if read.operands[1].name != write.result.name or not _is_plain(read):
            return None
        producers = graph.producers()
        parts = _joined(write.operands[1], producers)
        if len(parts) != 2:
            return None
        keys, values = (_heads_of(v, producers) for v in (parts[0], write.operands[2]))
        rotary = _shared(parts[1], producers)
        if keys is None or values is None or rotary is None or keys.latent != values.latent:
            return None
        queries = _joined(read.operands[0], producers)
        if [v.type for v in queries] != [v.type for v in parts]:
            queries = ()
        found = _Latents(write, read, keys, values, rotary, queries)
        return found if read.operands[0].tensor.shape[1] == parts[0].tensor.shape[1] else None


def _is_plain(read: Op) -> bool:
    return not attr_value(read, "window") and not attr_value(read, "softcap")


def _joined(value: Value, producers: Mapping[str, Op]) -> tuple[Value, ...]:
    """What a value [T, H, D] is put together from along D; () if it is made otherwise."""
    op = producers.get(value.name)
    if op is None or op.name != "concat" or axis_of(op.attr["dim"], 3) != 2:
        return ()
    return op.operands


def _shared(value: Value, producers: Mapping[str, Op]) -> Value | None:
    """The [T, 1, R] that is repeated for every head."""
    op = producers.get(value.name)
    if op is None or op.name != "broadcast":
        return None
    (one,) = op.operands
    return one if one.tensor.rank == 3 and one.tensor.shape[1] == dim(1) else None


def _heads_of(value: Value, producers: Mapping[str, Op]) -> _Heads | None:
    """Follow a part of heads back to the product of a latent by a weight, heads untied."""
    start, width = 0, value.tensor.shape[-1].static
    op = producers.get(value.name)
    if op is not None and op.name == "slice":
        bounds = [size_of(op.attr[name]) for name in ("start", "stop")]
        whole = axis_of(op.attr["dim"], 3) != 2 or attr_value(op, "step") != 1
        if whole or not all(b.is_static for b in bounds):
            return None
        start, value = bounds[0].static, op.operands[0]
        op = producers.get(value.name)
    if op is None or op.name != "reshape" or op.operands[0].tensor.rank != 2:
        return None
    product = producers.get(op.operands[0].name)
    if product is None or product.name != "linear" or len(product.operands) != 2:
        return None
    latent, weight = product.operands
    if not weight.is_weight or value.tensor.shape[0] != latent.tensor.shape[0]:
        return None
    return _Heads(latent, weight, value.tensor.shape[-1].static, start, start + width)


# --- rewriting ---------------------------------------------------------------------------------


def _absorbed(module: Module, found: _Latents) -> Module:
    """The module with weights by heads and the attention over latents."""
    name = _graph_of(module, found)
    editor = LoadEditor(module, name)
    by_heads: dict[str, Value] = {}
    weights = []
    for part, use in ((found.keys, "keys"), (found.values, "values")):
        weight = part.weight.name
        if weight not in by_heads:
            shape = (found.heads, part.width, part.latent.tensor.shape[-1].static)
            by_heads[weight] = editor.emit("reshape", editor.made(weight), shape=shape)
        cut = by_heads[weight]
        if (part.start, part.stop) != (0, part.width):
            cut = editor.emit("slice", cut, dim=1, start=part.start, stop=part.stop)
        weights.append(editor.add(f"{weight}.{use}", cut))
    # Whatever is read no more goes, the products of the latent and their weight among it.
    module = editor.finish(lambda graph: _rewritten(graph, found, weights[0], weights[1]))
    module = prune(module, module.graph(name))
    return module.with_graph(canonical_names(module.graph(name)))


def _graph_of(module: Module, found: _Latents) -> str:
    return next(g.name for g in module.graphs if found.read in g.ops)


def _rewritten(graph: Graph, found: _Latents, w_k: Value, w_v: Value) -> Graph:
    state = Value(graph.states[0].name, _latent_state(found))
    ops: list[Op] = []
    alias: dict[str, Value] = {}
    builder = Builder(_next_number(graph))
    for op in graph.ops:
        at = len(builder.ops)
        if op.results == found.write.results:
            alias[op.result.name] = _write(builder, found, state)
        elif op.results == found.read.results:
            written = alias[found.write.result.name]
            alias[op.result.name] = _read(builder, found, written, w_k, w_v)
        else:
            ops.append(replace(op, operands=tuple(alias.get(v.name, v) for v in op.operands)))
        ops += [replace(made, source=op.source) for made in builder.ops[at:]]
    return replace(
        graph,
        ops=tuple(ops),
        states=(state,),
        outputs=tuple(alias.get(v.name, v) for v in graph.outputs),
        state_outputs=tuple(alias.get(v.name, v) for v in graph.state_outputs),
    )


def _next_number(graph: Graph) -> int:
    numbers = [int(v.name[1:]) for op in graph.ops for v in op.results if v.name[1:].isdigit()]
    return max(numbers, default=-1) + 1


def _latent_state(found: _Latents) -> StateType:
    """Latents in the format of the keys that they stand for; rotary keys as they are."""
    before = found.write.operands[0].state
    rank, rope, _, _ = found.widths
    latent = found.keys.latent.tensor
    plain = TensorType((dim(rank),), latent.dtype)
    kept = KV_FP8 if is_rounded(before) else before.field_type("k").dtype
    fields = entry_fields(LATENT, plain, kept)
    rotary = latent.dtype if is_rounded(before) else kept
    return replace(before, fields=(*fields, (ROTARY, TensorType((dim(rope),), rotary))))


def _write(builder: Builder, found: _Latents, state: Value) -> Value:
    rope = found.widths[1]
    tokens = found.rotary.tensor.shape[0]
    rotary = builder.emit("reshape", found.rotary, shape=(tokens.attr, rope))
    return builder.emit("latent_write", state, found.keys.latent, rotary, found.write.operands[3])


def _read(builder: Builder, found: _Latents, state: Value, w_k: Value, w_v: Value) -> Value:
    _, rope, plain, _ = found.widths
    q, _, *step = found.read.operands
    if found.queries:
        first, second = found.queries
    else:
        first = builder.emit("slice", q, dim=-1, start=0, stop=plain)
        second = builder.emit("slice", q, dim=-1, start=plain, stop=plain + rope)
    scale = attr_value(found.read, "scale") or (plain + rope) ** -0.5
    absorbed = _by_heads(builder, first, w_k, transpose_b=False)
    mixed = builder.emit("latent_attention", absorbed, second, state, *step, scale=scale)
    return _by_heads(builder, mixed, w_v, transpose_b=True)


def _by_heads(builder: Builder, x: Value, weight: Value, *, transpose_b: bool) -> Value:
    """A product of each head by its own matrix: [T, H, A] by [H, ...] -> [T, H, B]."""
    turned = builder.emit("transpose", x, perm=(1, 0, 2))
    made = builder.emit("matmul", turned, weight, transpose_b=transpose_b)
    return builder.emit("transpose", made, perm=(1, 0, 2))


# --- the report --------------------------------------------------------------------------------


def _decision(graph: Graph, found: _Latents) -> Decision:
    """What it saves of memory, and what it costs in arithmetic."""
    rank, rope, plain, value = found.widths
    before = graph.states[0].state.entry_bytes()
    after = _latent_state(found).entry_bytes()
    pairs = found.heads * (plain + rope + value), found.heads * (2 * rank + rope)
    reason = (
        f"keys and values of {found.heads} heads are made from {rank} + {rope} numbers a token: "
        f"{after:,} bytes of a token are kept instead of {before:,}; a score and its value take "
        f"{2 * pairs[1]:,} operations instead of {2 * pairs[0]:,}, in prefill as in decode"
    )
    data = (("bytes_before", before), ("bytes_after", after))
    return Decision(
        "absorb_latents", f"{graph.name}: {graph.states[0].name}", "latents", reason, data=data
    )
