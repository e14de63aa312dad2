"""verify: measures what a plan's numbers are worth, against float32 of the same weights.

A language model is held against its own float32 plan; any other module against PyTorch itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from metainfer.backends.torch.tensors import to_torch
from metainfer.compiler.api import compile as compile_plan
from metainfer.compiler.finite import refuse_not_finite
from metainfer.compiler.interpreted import tiny_error
from metainfer.compiler.perplexity import DEFAULT_TEXT, Comparison, compare, walks
from metainfer.compiler.sources import resolve_model
from metainfer.hardware.load import load_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import CapacityError, CheckpointError, MetainferError
from metainfer.ir.options import Options
from metainfer.ir.plan import Plan
from metainfer.models import MODELS
from metainfer.models.spec import ModelSpec
from metainfer.runtime.checkpoint import TensorSource, open_checkpoint
from metainfer.runtime.load import LoadedModel, load
from metainfer.runtime.tokenizer import load_tokenizer
from metainfer.runtime.weights import CheckpointProvider

Show = Callable[[str], None]

# Mean divergence that a plan may have, in nats: one that only rounds otherwise, one whose kernels
# round activations too, one whose weights were quantized to four bits. SmolLM2, whose 135 million
# weights forgive little, has 0.014 to 0.024 at fp8, 0.027 to 0.036 with fp8 activations, too, and
# 0.50 to 0.91 at mxfp4, 0.18 to 0.25 at nvfp4, and 0.007 to 0.010 by fp8 keys and values. Sums
# between ranks as fp8 count as the second.
EXACT_KL, LOSSY_KL, INT4_KL, MXFP4_KL, NVFP4_KL = 1e-6, 0.05, 0.2, 1.5, 0.5
_BY_WEIGHTS = {"int4": INT4_KL, "mxfp4": MXFP4_KL, "nvfp4": NVFP4_KL}
# Greatest error relative to the greatest result, by the activations' type.
_RELATIVE_ERROR = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}
_LOSSY_ERROR = 0.05  # kernels that round activations to eight bits, through a whole model
# The reference goes without them: a fault of a rewrite must not stand on both sides.
_REWRITES = ("raise", "raise_experts", "absorb_latents", "merge_linears", "seam", "fuse")
_WINDOW = 1024  # tokens of one sequence


@dataclass(frozen=True)
class ResultError:
    """How far a result is from its reference.

    Attributes:
        name: of the result.
        max_error: greatest difference.
        relative_error: that over the greatest result.
        limit: greatest relative error that passes.
    """

    name: str
    max_error: float
    relative_error: float
    limit: float


@dataclass(frozen=True)
class Verification:
    """What verify found.

    Attributes:
        plan_hash: of the plan.
        reference: what it was held against.
        comparisons: for a language model: its distributions on a text.
        errors: results of a module; of a language model's tiny form, against the interpreter.
        tokens: length of the text.
        limit: greatest mean divergence that passes.
    """

    plan_hash: str
    reference: str
    comparisons: tuple[Comparison, ...]
    errors: tuple[ResultError, ...]
    tokens: int
    limit: float

    @property
    def passed(self) -> bool:
        """Whether everything is within the limit; a number that is not finite is not."""
        near = all(c.mean_kl <= self.limit for c in self.comparisons)
        return near and all(e.relative_error <= e.limit for e in self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "passed": self.passed}


def verify(
    plan: Plan,
    *,
    model: str | Path | ModelSpec | nn.Module | None = None,
    weights: str | Path | None = None,
    text: str | None = None,
    tokens: int = 256,
    limit: float | None = None,
    allow_machine_mismatch: bool = False,
    allow_checkpoint_mismatch: bool = False,
    num_threads: int = 0,
    progress: Show = lambda message: None,
) -> Verification:
    """Measure a plan's numerics.

    Args:
        plan: the plan.
        model: the model again, where the plan cannot name it safely; a plan never makes Python
            files run.
        weights: checkpoint, instead of the one that the plan names.
        text: what a language model reads; a short English text of ours if None.
        tokens: at most so many of it, 0 for all.
        limit: greatest mean divergence (language model) or relative error (module) that passes;
            None takes `default_limit`, or what the activations' type allows.
        allow_machine_mismatch: run although this machine lacks what the plan counts on.
        allow_checkpoint_mismatch: take another checkpoint than the plan was compiled with.
        num_threads: CPU threads, 0 for all.
        progress: called with one line as each stage begins.

    Raises: MetainferError if the model cannot be found again; what compile and load raise.
    """
    spec = reference_spec(plan, model, weights)
    options: dict[str, Any] = {
        "allow_machine_mismatch": allow_machine_mismatch,
        "allow_checkpoint_mismatch": allow_checkpoint_mismatch,
        "num_threads": num_threads,
    }
    if plan.meta["model"]["kind"] != "causal_lm":
        if text is not None:
            raise MetainferError("--text is for language models, the plan is of a module")
        progress("computing the reference in PyTorch")
        return _verify_module(plan, spec, weights, limit, options)
    progress("loading the plan")
    loaded = load(plan, weights, **options)
    ids = _tokens(plan, loaded, text, tokens)
    window = min(len(ids), _WINDOW, loaded.max_context)
    progress("compiling the float32 reference")
    reference = compile_reference(plan, spec, window)
    progress("loading the reference")
    # The plan has been held against these weights; the reference takes them whatever they are.
    held = load(reference, weights, **{**options, "allow_checkpoint_mismatch": True})
    found = []
    for walk in walks(ids, loaded.max_tokens, loaded.max_sequences, window):
        progress(walk.name)
        _check_room(loaded, len(walk.steps[-1].sequences), walk.longest)
        found.append(compare(walk, loaded, held, partial(refuse_not_finite, loaded)))
    allowed = default_limit(plan) if limit is None else limit
    progress("interpreting the tiny form")
    errors = _tiny_errors(plan, spec)
    name = f"its float32 plan {reference.hash} on {reference.meta['machine']['name']}"
    return Verification(plan.hash, name, tuple(found), errors, len(ids), allowed)


def default_limit(plan: Plan) -> float:
    """Mean divergence that passes: next to none for a plan that should only round otherwise."""
    asked = plan.meta["options"]["weights"]
    if asked in _BY_WEIGHTS:
        return _BY_WEIGHTS[asked]
    strategies = [plan.meta["phases"][p]["strategy"] for p in plan.phases]
    is_exact = not compresses(plan) and all(
        s["exact"] and s["activations"] == "f32" and s["kv"] == "f32" and not s["fp8_activations"]
        for s in strategies
    )
    return EXACT_KL if is_exact and asked in ("auto", "keep", "f32") else LOSSY_KL


def compresses(plan: Plan) -> bool:
    """Whether sums between ranks may go as narrower codes."""
    return bool(plan.meta["options"].get("compress_collectives", "none") != "none")


# --- the reference -----------------------------------------------------------------------------


def reference_spec(
    plan: Plan, model: str | Path | ModelSpec | nn.Module | None, weights: str | Path | None
) -> ModelSpec:
    """The model of a plan again.

    What a plan names is opened only if that runs no code: a model that comes with metainfer, a
    Hugging Face folder, a GGUF file.

    Raises: MetainferError asking for the model if the plan cannot name it safely.
    """
    if model is not None:
        return resolve_model(model)
    meta = plan.meta["model"]
    for place in (meta["argument"], weights, meta["checkpoint"]):
        if place in MODELS or (place and _is_data(Path(place))):
            return resolve_model(str(place))
        if place == meta["argument"] and place:
            break
    named = meta["argument"] or f"the model {meta['name']}"
    raise MetainferError(
        f"the reference needs {named}, and a plan makes no Python run",
        advice=f"name it yourself: --model {meta['argument'] or 'MODEL'}",
    )


def _is_data(path: Path) -> bool:
    return (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file()


def compile_reference(plan: Plan, spec: ModelSpec, context: int) -> Plan:
    """The float32 plan of the model as captured: not rewritten, exact kernels, on a CPU."""
    capacity = plan.meta["capacity"]
    planned = Machine.from_dict(dict(plan.meta["machine"]))
    machine = planned if planned.device(0).kind == "cpu" else load_machine("cpu")
    options = Options(
        activations="f32", weights="f32", kv="f32", exact=True,
        max_tokens=capacity["max_tokens"], max_sequences=capacity["max_sequences"],
        max_context=context, skip_passes=_REWRITES,
    )  # fmt: skip
    return compile_plan(spec, machine, options=options)


# --- language models ---------------------------------------------------------------------------


def _tiny_errors(plan: Plan, spec: ModelSpec) -> tuple[ResultError, ...]:
    if spec.tiny is None:
        return ()
    error, relative = tiny_error(plan, spec)
    activations = plan.meta["phases"]["decode"]["strategy"]["activations"]
    is_lossy = default_limit(plan) != EXACT_KL
    limit = _LOSSY_ERROR if is_lossy else _RELATIVE_ERROR[activations]
    return (ResultError("tiny form against the interpreter", error, relative, limit),)


def _tokens(plan: Plan, model: LoadedModel, text: str | None, most: int) -> list[int]:
    path = plan.meta["model"]["tokenizer"]
    if path and Path(path).exists():
        ids = load_tokenizer(Path(path)).encode(DEFAULT_TEXT if text is None else text)
    elif text is None:
        # Without a tokenizer any tokens do: both models read the same ones.
        rng = np.random.default_rng(0)
        ids = rng.integers(0, model.vocab_size, most or 256).tolist()
    else:
        raise MetainferError(
            f"there is no tokenizer for {plan.meta['model']['name']}, so no text can be read",
            advice="leave --text away: random tokens are compared then",
        )
    ids = ids[:most] if most else ids
    if len(ids) < 2:
        raise MetainferError(
            "the text has fewer than two tokens", advice="give a longer text, or more --tokens"
        )
    return ids


def _check_room(model: LoadedModel, sequences: int, longest: int) -> None:
    needed = sequences * -(-longest // model.page_size) + 1
    if needed > model.num_pages:
        raise CapacityError(
            f"{sequences} sequences of {longest} tokens need {needed} pages, the plan has "
            f"{model.num_pages}",
            advice="give fewer --tokens",
        )


# --- modules -----------------------------------------------------------------------------------


def _verify_module(
    plan: Plan,
    spec: ModelSpec,
    weights: str | Path | None,
    limit: float | None,
    options: Mapping[str, Any],
) -> Verification:
    if spec.example_inputs is None:
        raise MetainferError(f"model {spec.name!r} has no example_inputs to verify it on")
    module = spec.build().float().eval()
    path = weights or plan.meta["model"]["checkpoint"]
    if path:
        _fill(module, Path(path), plan)
    loaded = load(plan, path or dict(module.state_dict()), **options)
    inputs = spec.example_inputs()
    with torch.no_grad():
        wanted = _flat(module(*(t.float() if t.is_floating_point() else t for t in inputs)))
    found = _flat(loaded(*inputs))
    activations = plan.meta["phases"]["call"]["strategy"]["activations"]
    is_rounded = compresses(plan) or plan.meta["phases"]["call"]["strategy"]["fp8_activations"]
    allowed = max(_RELATIVE_ERROR[activations], _LOSSY_ERROR if is_rounded else 0.0)
    allowed = allowed if limit is None else limit
    errors = tuple(
        _error(f"output{number}", a, b, allowed)
        for number, (a, b) in enumerate(zip(found, wanted, strict=True))
    )
    return Verification(plan.hash, "PyTorch in float32", (), errors, 0, allowed)


def _flat(made: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(made, torch.Tensor):
        return (made,)
    values = made.values() if isinstance(made, Mapping) else made
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def _error(name: str, found: torch.Tensor, wanted: torch.Tensor, limit: float) -> ResultError:
    error = float((found.double() - wanted.double()).abs().max())
    greatest = float(wanted.double().abs().max())
    return ResultError(name, error, error / greatest if greatest else error, limit)


def _fill(module: nn.Module, path: Path, plan: Plan) -> None:
    """Load a module's own tensors from the checkpoint, dequantized."""
    checkpoint = open_checkpoint(path)
    try:
        provide = CheckpointProvider(TensorSource(checkpoint), plan.meta["model"]["renames"])
        state = {}
        for name, tensor in module.state_dict().items():
            try:
                held = provide(name)
            except CheckpointError:
                if name in plan.constants:
                    continue  # the module makes it itself
                raise
            array = held.dequantize() if isinstance(held, BlockArray) else held
            state[name] = to_torch(array).to(tensor.dtype).reshape(tensor.shape)
    finally:
        checkpoint.close()
    module.load_state_dict(state, strict=False)
