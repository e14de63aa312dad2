"""load: a plan becomes something that runs: a language model behind an engine, or a callable."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metainfer.backends.registry import Backends, installed
from metainfer.backends.sources import check_fingerprints
from metainfer.hardware.detect import detect_machine
from metainfer.hardware.machine import Machine, matches
from metainfer.ir.arena import plan_arena
from metainfer.ir.errors import CapacityError, CheckpointError, PlanError, TypeMismatch
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Module, Value
from metainfer.ir.interpret import unify
from metainfer.ir.plan import Plan
from metainfer.ir.verify import verify_module
from metainfer.runtime.checkpoint import Checkpoint, TensorSource, open_checkpoint
from metainfer.runtime.executor import Measured, Observer, PhaseExecutor
from metainfer.runtime.legality import check_kernels
from metainfer.runtime.storage import Storage
from metainfer.runtime.weights import (
    CheckpointProvider,
    Provider,
    WeightStore,
    state_dict_provider,
)
from metainfer.runtime.workspace import workspace_bytes

Weights = Mapping[str, Any] | Provider | str | Path | None


def load(
    plan: Plan | str | Path,
    weights: Weights = None,
    *,
    allow_machine_mismatch: bool = False,
    allow_checkpoint_mismatch: bool = False,
    num_threads: int = 0,
) -> "LoadedModel":
    """Load a plan and its weights.

    Args:
        plan: a Plan, or the folder of one.
        weights: where tensors come from: a checkpoint's path, a state_dict, or a function from
            name to array; None takes the checkpoint that the plan names.
        allow_machine_mismatch: run although this machine lacks what the plan counts on.
        allow_checkpoint_mismatch: take another checkpoint of the same model (a fine-tune, say) than
            the plan was compiled with; names, sizes and formats must agree nevertheless.
        num_threads: CPU threads; 0 takes every processor given to this process.

    Raises: PlanError for a plan of another machine, other kernels or another checkpoint;
        CheckpointError for weights that do not fit the plan.
    """
    found = plan if isinstance(plan, Plan) else Plan.read(Path(plan))
    machine = Machine.from_dict(dict(found.meta["machine"]))
    check_fingerprints(dict(found.meta["kernel_sources"]))
    if not allow_machine_mismatch:
        _check_machine(machine)
    provider = _provider(found, weights, allow_checkpoint_mismatch)
    return LoadedModel(found, machine, provider, installed(), num_threads)


def _check_machine(planned: Machine) -> None:
    kind = planned.device(0).kind
    if kind == "gpu" and not torch.cuda.is_available():
        raise PlanError(
            f"the plan is for {planned.name}, here is no GPU",
            advice="compile for this machine (--hw cpu), or run the plan where its GPUs are",
        )
    here = detect_machine(kind, planned.num_devices if kind == "cpu" else None)
    differences = matches(planned, here)
    if differences:
        raise PlanError(
            f"the plan was made for {planned.name}, and this machine differs",
            text="\n".join(differences),
            advice="compile for this machine (metainfer hw new), or insist with "
            "--allow-machine-mismatch",
        )


def _provider(plan: Plan, weights: Weights, allow_other: bool) -> Provider:
    renames = dict(plan.meta["model"]["renames"])
    if callable(weights):
        return weights
    if isinstance(weights, Mapping):
        return state_dict_provider(weights, plan.constants)
    path = weights or plan.meta["model"]["checkpoint"]
    if not path:
        raise CheckpointError(
            f"the plan of {plan.meta['model']['name']} names no checkpoint",
            advice="give --weights PATH, or weights=... in Python",
        )
    checkpoint = open_checkpoint(Path(path))
    if not allow_other:
        _check_checkpoint(plan, checkpoint, str(path))
    return CheckpointProvider(TensorSource(checkpoint), renames, plan.constants)


def _check_checkpoint(plan: Plan, checkpoint: Checkpoint, path: str) -> None:
    """Hold the fingerprint against that of the checkpoint that the plan was compiled with."""
    wanted = plan.meta["model"]["checkpoint_hash"]
    if not wanted:
        return  # compiled without weights: any that fit will do
    found = checkpoint.content_hash()
    if found != wanted:
        checkpoint.close()
        raise PlanError(
            f"the checkpoint is not the one that the plan of {plan.meta['model']['name']} was "
            "compiled with",
            text=f"fingerprint {found[:16]}..., the plan says {wanted[:16]}...",
            origin=path,
            advice="give that checkpoint (--weights PATH), compile again, or insist with "
            "--allow-checkpoint-mismatch",
        )


class LoadedModel:
    """A plan with its weights in memory.

    For a language model: `run` executes one step (see `runtime.runner.StepRunner`), `engine` serves
    requests. For any other module the object is called with the module's inputs.
    """

    def __init__(
        self, plan: Plan, machine: Machine, provider: Provider, backends: Backends, num_threads: int
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.plan_hash = plan.hash
        capacity = plan.meta["capacity"]
        self.max_tokens = int(capacity["max_tokens"])
        self.max_sequences = int(capacity["max_sequences"])
        self.max_context = int(capacity["max_context"])
        self.page_size = int(capacity["page_size"])
        self.num_pages = int(capacity["num_pages"])
        _set_threads(num_threads)
        self._backends = backends
        self._phases = _executors(plan, machine, provider, backends, self)
        self.vocab_size = _vocab_size(next(iter(self._phases.values())))

    @property
    def is_language_model(self) -> bool:
        """Whether the plan is one of steps over tokens."""
        return bool(self.plan.meta["model"]["kind"] == "causal_lm")

    def executor(self, phase: str) -> PhaseExecutor:
        """The executor of a phase."""
        return self._phases[phase]

    # --- language models -----------------------------------------------------------------------

    def run(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run one step.

        Shapes: tokens i32 [T], step fields as in `ir.step` -> logits f32 [R, V], valid until the
        next run.
        Raises: CapacityError if the step is larger than the plan's.
        """
        executor, env = self._prepare(phase, tokens, step)
        executor.run(env)
        return executor.output(0, env).float().cpu().numpy()

    def trace(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
    ) -> tuple[list[Measured], dict[str, int]]:
        """Run one step, timing every group; returns the sizes too."""
        executor, env = self._prepare(phase, tokens, step)
        return executor.trace(env), env

    def observe(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        watched: Mapping[str, Value],
        seen: Observer,
    ) -> np.ndarray:
        """Run one step, showing values on the way (`PhaseExecutor.observe`). Shapes: as `run`."""
        executor, env = self._prepare(phase, tokens, step)
        executor.observe(env, watched, seen)
        return executor.output(0, env).float().cpu().numpy()

    def _prepare(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
    ) -> tuple[PhaseExecutor, dict[str, int]]:
        executor = self._phases[phase]
        env = {
            "T": len(tokens), "B": len(step["lengths"]), "P": step["pages"].shape[1],
            "R": len(step["sample_rows"]),
        }  # fmt: skip
        _check_sizes(executor.module, env)
        self._storage.set_step(step)
        executor.input(0, env).copy_(torch.from_numpy(np.ascontiguousarray(tokens, np.int32)))
        return executor, env

    def engine(self) -> Any:
        """An engine over this model, with the plan's tokenizer if it is here."""
        from metainfer.runtime.engine import Engine
        from metainfer.runtime.tokenizer import load_tokenizer

        path = self.plan.meta["model"]["tokenizer"]
        tokenizer = load_tokenizer(Path(path)) if path and Path(path).exists() else None
        return Engine(self, tokenizer)

    # --- modules -------------------------------------------------------------------------------

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a module of kind "module" on tensors; the results are copies.

        Raises: CapacityError or TypeMismatch if the sizes are not those compiled for.
        """
        executor = self._phases["call"]
        wanted = len(executor.flat.inputs)
        if len(inputs) != wanted:
            raise TypeMismatch(
                f"the module takes {wanted} inputs, got {len(inputs)}",
                advice=f"in order: {', '.join(self.plan.meta['model']['inputs'])}",
            )
        env: dict[str, int] = {}
        for value, tensor in zip(executor.flat.inputs, inputs, strict=True):
            unify(value, tuple(tensor.shape), env)
        _check_sizes(executor.module, env)
        for index, tensor in enumerate(inputs):
            executor.input(index, env).copy_(tensor)
        executor.run(env)
        outputs = tuple(executor.output(i, env).clone() for i in range(len(executor.flat.outputs)))
        return outputs[0] if len(outputs) == 1 else outputs

    _storage: Storage


def _executors(
    plan: Plan, machine: Machine, provider: Provider, backends: Backends, model: LoadedModel
) -> dict[str, PhaseExecutor]:
    device = machine.device(0)
    modules = {phase: plan.module(phase) for phase in plan.phases}
    for module in modules.values():
        # Kernels trust shapes and write by address: a plan from elsewhere must not mislead them.
        verify_module(module)
        check_kernels(module, device, backends)
    flats = {phase: flatten(m) for phase, m in modules.items()}
    arenas = {
        phase: plan_arena(
            flats[phase], m.limits(), workspace_bytes(m, flats[phase], device, backends)
        )
        for phase, m in modules.items()
    }
    where = torch.device("cuda" if device.kind == "gpu" else "cpu")
    highs = _highs(modules.values())
    storage = Storage(
        max(a.size for a in arenas.values()), highs, where, model.max_context,
        has_step=any(m.has_step for m in modules.values()),
    )  # fmt: skip
    model._storage = storage
    store = WeightStore(provider, backends)
    for phase, module in modules.items():
        for name, weight in flats[phase].weights.items():
            storage.add_weight(phase, name, store.get(module, weight))
        for name, state in flats[phase].states.items():
            if name not in storage.states:
                storage.add_state(name, state.state, model.num_pages)
    return {
        phase: PhaseExecutor(module, flats[phase], arenas[phase], storage, backends, phase)
        for phase, module in modules.items()
    }


def _vocab_size(executor: PhaseExecutor) -> int:
    """Width of the logits; 0 for a module whose first result has none."""
    shape = executor.flat.outputs[0].tensor.shape
    return shape[-1].static if shape and shape[-1].is_static else 0


def _highs(modules: Any) -> dict[str, int]:
    highs: dict[str, int] = {}
    for module in modules:
        for symbol in module.symbols:
            highs[symbol.name] = max(highs.get(symbol.name, 0), symbol.high)
    return highs


def _check_sizes(module: Module, env: Mapping[str, int]) -> None:
    for symbol in module.symbols:
        value = env.get(symbol.name, symbol.low)
        if not symbol.low <= value <= symbol.high:
            raise CapacityError(
                f"{symbol.name} = {value} is outside the plan's [{symbol.low}, {symbol.high}]",
                advice="compile with larger --max-tokens, --max-sequences or --max-context; for a "
                "module with other bounds",
            )


def _set_threads(count: int) -> None:
    import os

    from metainfer.backends.cpu.program import set_num_threads

    available = len(os.sched_getaffinity(0))
    torch.set_num_threads(count or available)
    if count:
        set_num_threads(count)
