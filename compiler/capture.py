"""Capture: a PyTorch module becomes a Module of the IR, by torch.export.

Structured ops of `models.functional` stay whole. Attention of a language model becomes a write to
and a read of a paged state; positions and sampled rows come from the step record. No weights are
needed.
"""

import contextlib
import inspect
import io
import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx, nn
from torch._decomp import get_decompositions

from metainfer.compiler.aten import ATEN
from metainfer.compiler.attach import full_weights
from metainfer.compiler.blocks import Flat, split_blocks
from metainfer.compiler.grouped_experts import raise_grouped
from metainfer.compiler.known_experts import replaced_experts
from metainfer.compiler.lowering import (
    Lowering,
    fake,
    lower_node,
    module_path,
    shown_path,
    source_of,
    target_name,
    unknown_op,
)
from metainfer.compiler.repeats import Repeats, repeated
from metainfer.ir.errors import MetainferError, Unsupported
from metainfer.ir.graph import Module, Value
from metainfer.ir.ops.record import Builder
from metainfer.ir.step import step_symbols, step_value
from metainfer.ir.types import StateType, Symbol
from metainfer.models.spec import PureBuild

TOKENS_NAME = "%tokens"
_EXAMPLE_TOKENS = 7  # >= 2 and unequal to any usual width, or export would specialise


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        module: typed IR; weights are named as in the checkpoint.
        constants: tensors that the model makes itself and no checkpoint has, by name.
        buffers: tensors that the model makes itself and that its state_dict has, by name: those
            of a checkpoint are other ones (statistics of training, say).
        unread: names in the model's state_dict that forward does not read.
        input_names: names of main's inputs as the model's forward calls them.
    """

    module: Module
    constants: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    unread: frozenset[str]
    input_names: tuple[str, ...]


def capture_language_model(
    name: str, build: Callable[[], nn.Module], *, dtype: torch.dtype, max_tokens: int,
    max_sequences: int, max_pages: int, kv_dtype: str,
) -> Captured:  # fmt: skip
    """Capture a causal language model: forward(tokens [T], positions [T]) -> logits [R, V].

    What was captured of a pure build is kept for the next one of the same sizes.
    Raises: Unsupported or TypeMismatch with the model's line.
    """
    make = _kept if isinstance(build, PureBuild) else _language_model
    return make(name, build, dtype, (max_tokens, max_sequences, max_pages), kv_dtype)


def _language_model(
    name: str, build: Callable[[], nn.Module], dtype: torch.dtype, sizes: tuple[int, int, int],
    kv_dtype: str,
) -> Captured:  # fmt: skip
    max_tokens, max_sequences, max_pages = sizes
    with torch.device("meta"):
        model = built(build).to(dtype).eval()
    tokens = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int32, device="meta")
    size = torch.export.Dim("T", min=1, max=max(max_tokens, _EXAMPLE_TOKENS + 1))
    examples = (tokens, torch.zeros_like(tokens))
    program, repeats = _trace(model, examples, ({0: size}, {0: size}))
    state = Lowering(Builder())
    inputs, weights = _placeholders(state, model, program, [["T"], ["T"]])
    state.values[inputs[1][0]] = step_value("positions")
    state.values[inputs[0][0]] = Value(TOKENS_NAME, inputs[0][1].type)
    table = {**ATEN, **_structured(kv_dtype), **repeats.lowerings()}
    outputs = _lower(state, program.graph, table)
    flat = Flat(
        name, (cast(Value, state.values[inputs[0][0]]),), tuple(weights), state, tuple(outputs),
        step_symbols(max_tokens, max_sequences, max_pages), True,
    )  # fmt: skip
    return _captured(flat, model, program, ("tokens",))


# For several machines, formats or phases in one process.
_kept = lru_cache(maxsize=8)(_language_model)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that a ModelSpec builds.

    Raises: MetainferError naming the line that fails, or what was returned instead of a module.
    """
    try:
        made = build()
    except MetainferError:
        raise
    except Exception as error:  # the user's code raises what it likes
        origin, text = _place_of(error)
        raise MetainferError(
            f"build() of the ModelSpec fails: {type(error).__name__}: {error}",
            text=text,
            origin=origin,
            advice="ModelSpec(build=...) must return the module when it is called alone",
        ) from error
    if isinstance(made, nn.Module):
        return made
    raise MetainferError(
        f"build() of the ModelSpec returns a {type(made).__name__}, wanted an nn.Module",
        advice="write build=lambda: MyModule()",
    )


def capture_module(
    name: str,
    model: nn.Module,
    examples: Sequence[torch.Tensor],
    dims: Sequence[Sequence[str]],
    bounds: Mapping[str, tuple[int, int]],
) -> Captured:
    """Capture any module that is called as a function of tensors.

    Args:
        name: name of the module.
        model: the module, on any device; its weights are only named.
        examples: example inputs, contiguous, dynamic sizes >= 2 and unlike each other.
        dims: per input, per dim: a symbol's name, or "" for a fixed size.
        bounds: inclusive bounds of each symbol.

    Raises: Unsupported or TypeMismatch with the model's line.
    """
    known = {s: torch.export.Dim(s, min=lo, max=hi) for s, (lo, hi) in bounds.items()}
    dynamic = tuple(
        {i: known[symbol] for i, symbol in enumerate(symbols) if symbol} for symbols in dims
    )
    with _inference(model):
        program, repeats = _trace(model, tuple(t.contiguous() for t in examples), dynamic)
    state = Lowering(Builder())
    inputs, weights = _placeholders(state, model, program, dims)
    outputs = _lower(state, program.graph, {**ATEN, **_structured(""), **repeats.lowerings()})
    symbols = tuple(Symbol(s, lo, hi) for s, (lo, hi) in bounds.items())
    flat = Flat(
        name, tuple(v for _, v in inputs), tuple(weights), state, tuple(outputs), symbols, False
    )
    names = tuple(node.name for node, _ in inputs)
    return _captured(flat, model, program, names)


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """The model in inference mode; the caller's module is given back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# --- torch.export ------------------------------------------------------------------------------


def _trace(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: tuple[Any, ...]
) -> tuple[torch.export.ExportedProgram, Repeats]:
    """Export with like layers traced once, or each where they are called more than once."""
    with replaced_experts(model) as left:
        try:
            with repeated(model) as repeats:
                program = _export(model, inputs, dynamic)
            if repeats.is_sound:
                return program, repeats
            return _export(model, inputs, dynamic), Repeats()
        except Unsupported as error:
            raise _with_notes(error, left) from error


def _with_notes(error: Unsupported, left: Sequence[str]) -> Unsupported:
    """The error, saying too which modules look like experts but are none that is known."""
    if not left:
        return error
    text = "\n".join([error.text, *(f"not replaced: {note}" for note in left)]).strip()
    return Unsupported(error.what, text=text, origin=error.origin, advice=error.advice)


def _export(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    try:
        # NOTE: torch prints what it traced to stderr when it gives up; the message says where.
        quiet = contextlib.redirect_stderr(io.StringIO())
        with torch.no_grad(), warnings.catch_warnings(), quiet:
            warnings.simplefilter("ignore")
            program = torch.export.export(
                model,
                inputs,
                dynamic_shapes=_as_called(model, dynamic),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            program = _known_ops_only(raise_grouped(program))
    except MetainferError:
        raise
    except Exception as error:  # torch.export raises many kinds; each is about the user's model
        raise _export_error(model, error) from error
    _refuse_writes(program)
    return program


def _refuse_writes(program: torch.export.ExportedProgram) -> None:
    """Results are all that a program gives back: one that also writes elsewhere is refused.

    Raises: Unsupported naming the buffer or input.
    """
    signature = program.graph_signature
    buffers = sorted(signature.buffers_to_mutate.values())
    inputs = sorted(signature.user_inputs_to_mutate.values())
    if buffers or inputs:
        named = ", ".join([f"buffer {n}" for n in buffers] + [f"input {n}" for n in inputs])
        raise Unsupported(
            f"forward writes to tensors that outlive it: {named}",
            advice="compute new tensors (x = x + 1, not x += 1); what lives from call to call is "
            "an input and a result",
        )


def _as_called(model: nn.Module, dynamic: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dynamic dims by parameter of forward: those of ``*args`` are one entry."""
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return dynamic
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*dynamic[:named], dynamic[named:]) if len(dynamic) > named else dynamic


def _known_ops_only(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose what no table knows, and in-place ops; leave everything else whole."""
    unknown = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.namespace == "aten" and target_name(node) not in ATEN:
            unknown.add(node.target)
    if not unknown:
        return program
    table = torch.export.default_decompositions()
    # Ops of the core set have no entry there, but most have a decomposition elsewhere.
    core = get_decompositions([op for op in unknown if op not in table])
    chosen: dict[Any, Any] = dict(core)
    chosen.update((op, table[op]) for op in unknown if op in table)
    return program.run_decompositions(chosen)


def _place_of(error: Exception) -> tuple[str, str]:
    """(file:line, text) of the innermost frame of the user's code, ("", "") without one."""
    mine = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename
        and not f.filename.endswith(("/compiler/capture.py", "/compiler/repeats.py"))
        and not f.filename.startswith("<")
    ]
    if not mine:
        return "", ""
    line = linecache.getline(mine[-1].filename, mine[-1].lineno or 0).strip()
    return f"{shown_path(mine[-1].filename)}:{mine[-1].lineno}", line


def _export_error(model: nn.Module, error: Exception) -> Unsupported:
    kind = type(error).__name__
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else kind
    origin, text = _place_of(error)
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        return Unsupported(
            f"{type(model).__name__}: control flow or a size depends on data",
            text=text,
            origin=origin,
            advice="branch with torch.where instead of if, pad to fixed sizes instead of "
            "nonzero or item, or call a structured op of metainfer.models.functional",
        )
    return Unsupported(
        f"{type(model).__name__} cannot be captured: {first_line}",
        text=text,
        origin=origin,
        advice="torch.export must be able to trace forward with the example inputs",
    )


# --- walking the exported graph ----------------------------------------------------------------


def _placeholders(
    state: Lowering,
    model: nn.Module,
    program: torch.export.ExportedProgram,
    dims: Sequence[Sequence[str]],
) -> tuple[list[tuple[fx.Node, Value]], list[Value]]:
    """Bind symbols, and give every placeholder its value."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names.update(signature.inputs_to_lifted_tensor_constants)
    first = _first_names(model)
    names = {node: first.get(name, name) for node, name in names.items()}
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    users = [n for n in nodes if n.name not in names]
    for node, symbols in zip(users, dims, strict=True):
        for size, symbol in zip(fake(node).shape, symbols, strict=True):
            if symbol and isinstance(size, torch.SymInt):
                state.symbols[str(size.node.expr)] = symbol
    inputs: list[tuple[fx.Node, Value]] = []
    weights: list[Value] = []
    for node in nodes:
        is_weight = node.name in names
        name = f"@{names[node.name]}" if is_weight else f"%{node.name}"
        value = Value(name, state.type_of(fake(node)))
        state.values[node] = value
        if is_weight and value not in weights:
            weights.append(value)
        elif not is_weight:
            inputs.append((node, value))
    return inputs, weights


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a shared parameter -> the first one, which checkpoints hold."""
    seen: dict[int, str] = {}
    return {
        name: seen.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _lower(state: Lowering, graph: fx.Graph, table: Mapping[str, Any]) -> list[Value]:
    for node in graph.nodes:
        if node.op == "output":
            return [_output(state, argument) for argument in node.args[0]]
        if node.op != "call_function":
            if node.op != "placeholder":
                raise unknown_op(f"{node.op} {node.target}")
            continue
        if target_name(node) == "getitem":
            source, index = node.args
            state.values[node] = state.values[cast(fx.Node, source)][index]
            continue
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | int):
            continue  # a size, read where it is used; or a condition of a runtime assertion
        lower_node(state, node, dict(table))
    raise Unsupported("the exported program returns nothing")


def _output(state: Lowering, argument: Any) -> Value:
    found = state.values.get(argument)
    if isinstance(found, Value):
        return found
    raise Unsupported(
        f"forward returns {argument!r}, which is no tensor", advice="return tensors only"
    )


def _captured(
    flat: Flat, model: nn.Module, program: torch.export.ExportedProgram, names: tuple[str, ...]
) -> Captured:
    made = _constants(program)
    state, module = frozenset(model.state_dict()), split_blocks(flat, model)
    return Captured(
        module,
        {name: tensor for name, tensor in made.items() if name not in state},
        {name: tensor for name, tensor in made.items() if name in state},
        state - {name for name, _ in full_weights(module)},
        names,
    )


def _constants(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """All tensors that the model makes itself: buffers and lifted constants."""
    found = {}
    signature = program.graph_signature
    for name in signature.inputs_to_buffers.values():
        found[name] = cast(torch.Tensor, program.state_dict.get(name, program.constants.get(name)))
    for name in signature.inputs_to_lifted_tensor_constants.values():
        found[name] = cast(torch.Tensor, program.constants[name])
    # numpy's files know no bf16; the load graph rounds back.
    return {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in found.items()}


# --- structured ops ----------------------------------------------------------------------------


def _structured(kv_dtype: str) -> dict[str, Any]:
    """Lowerings of `models.functional`; without ``kv_dtype`` attention stays dense."""
    table: dict[str, Any] = {
        f"metainfer.{name}": _same_name(name)
        for name in ("rms_norm", "rope", "silu_mul", "gelu_mul", "experts", "choose_experts")
    }
    table["metainfer.sample_rows"] = _sample_rows if kv_dtype else _whole_rows
    table["metainfer.attention"] = _paged(kv_dtype) if kv_dtype else _dense_attention
    return table


def _same_name(name: str) -> Callable[[Lowering, fx.Node], Value | tuple[Value, ...]]:
    def lower(s: Lowering, n: fx.Node) -> Value | tuple[Value, ...]:
        operands, attrs = _split_arguments(s, n)
        first, *more = s.emit_many(name, *operands, **attrs)
        return (first, *more) if more else first

    return lower


def _split_arguments(s: Lowering, n: fx.Node) -> tuple[list[Value], dict[str, Any]]:
    """Tensor arguments as operands, all others as attributes named by the op's schema."""
    schema = cast(torch._ops.OpOverload, n.target)._schema
    given: dict[str, Any] = dict(n.kwargs)
    given.update({a.name: v for a, v in zip(schema.arguments, n.args, strict=False)})
    operands = [s.value(v) for v in given.values() if isinstance(v, fx.Node)]
    attrs = {k: v for k, v in given.items() if not isinstance(v, fx.Node) and v is not None}
    return operands, attrs


def _sample_rows(s: Lowering, n: fx.Node) -> Value:
    value = s.emit("gather", s.value(n.args[0]), step_value("sample_rows"))
    # From here on the sizes are those of the sampled rows, whatever torch traced.
    _retype_rows(s, n)
    return value


def _retype_rows(s: Lowering, n: fx.Node) -> None:
    """Let later nodes be checked against R rows instead of T."""
    s.symbols = {symbol: ("R" if name == "T" else name) for symbol, name in s.symbols.items()}


def _whole_rows(s: Lowering, n: fx.Node) -> Value:
    return s.value(n.args[0])


def _paged(kv_dtype: str) -> Callable[[Lowering, fx.Node], Value]:
    def lower(s: Lowering, n: fx.Node) -> Value:
        (q, k, v), attrs = _split_arguments(s, n)
        name = f"{module_path(n)}.kv" if module_path(n) else "kv"
        state = _declare_state(s, name, k, v, kv_dtype)
        written = s.emit("kv_write", state, k, v, step_value("slots"))
        s.final[name] = written
        step = (step_value(f) for f in ("starts", "lengths", "pages"))
        return s.emit("attention", q, written, *step, **attrs)

    return lower


def _declare_state(s: Lowering, name: str, k: Value, v: Value, kv_dtype: str) -> Value:
    if name in s.states:
        raise Unsupported(
            f"two attentions in one module ({name})",
            origin=str(source_of(cast(fx.Node, s.node)) or ""),
            advice="put each attention in an nn.Module of its own, so that its cache has a name",
        )
    from metainfer.ir.dtypes import parse_dtype
    from metainfer.ir.entries import entry_fields

    dtype = parse_dtype(kv_dtype)
    fields = [
        field
        for held, value in (("k", k), ("v", v))
        for field in entry_fields(held, value.tensor.with_shape(value.tensor.shape[1:]), dtype)
    ]
    state = Value(f"${name}", StateType("pages", tuple(fields)))
    s.states[name] = state
    return state


def _dense_attention(s: Lowering, n: fx.Node) -> Value:
    raise Unsupported(
        "functional.attention in a module that is no language model",
        advice="call torch.nn.functional.scaled_dot_product_attention, or use kind='causal_lm'",
    )
