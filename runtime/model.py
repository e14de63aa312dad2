"""A loaded model: the modules of a plan with their weights in memory, ready to run."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from metainfer.backends.registry import Backends
from metainfer.backends.triton.sampling import Draw
from metainfer.hardware.machine import Machine
from metainfer.ir.arena import plan_arena
from metainfer.ir.errors import CapacityError, TypeMismatch
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Module, Value
from metainfer.ir.interpret import unify
from metainfer.ir.plan import Plan
from metainfer.ir.verify import verify_module
from metainfer.runtime.device_sampling import Chosen, DeviceSampler
from metainfer.runtime.executor import Measured, Observer, PhaseExecutor
from metainfer.runtime.fallback import Standbys, settled
from metainfer.runtime.graphs import Step, StepGraphs, bucket
from metainfer.runtime.in_place import in_place
from metainfer.runtime.legality import check_kernels
from metainfer.runtime.readback import Readback
from metainfer.runtime.scheduler import pad_step
from metainfer.runtime.step_record import SOURCES, TOKENS
from metainfer.runtime.storage import Storage
from metainfer.runtime.weights import Provider, WeightStore
from metainfer.runtime.workspace import workspace_bytes

if TYPE_CHECKING:
    from metainfer.runtime.engine import Engine
    from metainfer.runtime.ranks import Ranks


class LoadedModel:
    """A plan with its weights in memory.

    For a language model: `run` executes one step (see `runtime.runner.StepRunner`), `engine` serves
    requests. For any other module the object is called with the module's inputs.

    Attributes:
        notes: lines for the user about loading: where it will run otherwise than planned.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, plan: Plan, machine: Machine, provider: Provider, backends: Backends,
        num_threads: int, ranks: "Ranks | None" = None,
        modules: Mapping[str, Module] | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.machine = machine
        self.plan_hash = plan.hash
        capacity = plan.meta["capacity"]
        self.max_tokens = int(capacity["max_tokens"])
        self.max_sequences = int(capacity["max_sequences"])
        self.max_context = int(capacity["max_context"])
        self.page_size = int(capacity["page_size"])
        self.num_pages = int(capacity["num_pages"])
        _set_threads(num_threads, ranks, has_cpu_kernels="cpu" in plan.meta["kernel_sources"])
        own = modules or {phase: plan.module(phase) for phase in plan.phases}
        self._standbys: Standbys | None = None
        if ranks is None:
            is_exact = bool(plan.meta["options"].get("exact"))
            self._standbys = Standbys(machine.device(0), backends, is_exact)
            settlements = {phase: settled(m, self._standbys) for phase, m in own.items()}
            own = {phase: module for phase, (module, _) in settlements.items()}
            self.notes = tuple(dict.fromkeys(n for _, found in settlements.values() for n in found))
        self._phases = self._executors(own, provider, backends, ranks)
        self.vocab_size = _vocab_size(plan.module(plan.phases[0], plan.layout.pp - 1))
        is_gpu = self._storage.device.type == "cuda"
        self._graphs: StepGraphs | None = self._captures() if is_gpu else None
        self._readback = Readback(self._storage.device)
        # Logits of other ranks come to the leader's host; without Triton they come there, too.
        has_triton = is_gpu and machine.device(0).has("triton")
        self._sampler = DeviceSampler(self._storage.device) if has_triton and not ranks else None

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
        return self._readback.numbers(self._logits(phase, tokens, step))

    @property
    def samples_on_device(self) -> bool:
        """Whether tokens are chosen where the logits lie."""
        return self._sampler is not None

    def start_sampled(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        draws: Sequence[Draw],
        names: Sequence[str],
        sources: np.ndarray | None = None,
    ) -> Chosen:
        """Start one step and the choice of its tokens (`runtime.runner.SamplingRunner`)."""
        assert self._sampler is not None
        return self._sampler.start(self._logits(phase, tokens, step, sources), draws, names)

    def _logits(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        sources: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Run one step; its logits where they lie, valid until the next run."""
        if phase == "decode" and self._graphs is not None:
            return self._replayed(self._graphs, tokens, step, sources)
        executor, env = self._prepare(phase, tokens, step, sources)
        executor.run(env)
        return executor.output(0, env)

    def _replayed(
        self, graphs: StepGraphs, tokens: np.ndarray, step: Mapping[str, np.ndarray],
        sources: np.ndarray | None,
    ) -> torch.Tensor:  # fmt: skip
        """A decode step as one graph of its bucket of sizes; padded rows are cut off again."""
        rows = len(step["sample_rows"])
        tokens, step = self._in_bucket(tokens, step)
        _, env = self._sized("decode", tokens, step)
        self._set_step(tokens, step, sources)
        made = graphs.step(env, lambda: self._capturable(env))
        graphs.run(env)
        return made.outputs[0][:rows]

    def _set_step(
        self, tokens: np.ndarray, step: Mapping[str, np.ndarray], sources: np.ndarray | None
    ) -> None:
        """Copy the record and the tokens in, or take those that the step in front chooses."""
        if sources is None:
            self._storage.set_step({**step, TOKENS: tokens})
            return
        assert self._sampler is not None
        self._storage.set_step({**step, TOKENS: tokens, SOURCES: sources})
        count = len(sources)
        given = self._storage.step_field(TOKENS)[:count]
        self._sampler.feed(self._storage.step_field(SOURCES)[:count], given)

    def _in_bucket(
        self, tokens: np.ndarray, step: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """A decode step padded up to its bucket of sizes."""
        executor, env = self._sized("decode", tokens, step)
        limits = executor.module.limits()
        most = {name: bucket(size, limits[name][1]) for name, size in env.items()}
        padded = pad_step(step, most["T"], most["B"], num_pages=most["P"], num_samples=most["R"])
        return np.pad(tokens, (0, most["T"] - env["T"])), padded

    def _capturable(self, env: Mapping[str, int]) -> Step:
        """A decode step at fixed sizes, reading its inputs from where nothing else is written.

        They lie in the arena, where later values of the step overwrite them.
        """
        executor = self._phases["decode"]
        held = [executor.input(i, env) for i in range(len(executor.flat.inputs))]
        given = self._given_to(held, env)
        copies = [partial(there.copy_, here) for there, here in zip(held, given, strict=True)]
        outputs = [executor.output(i, env) for i in range(len(executor.flat.outputs))]
        return Step([*copies, *executor.launches(env)], given, tuple(outputs))

    def _given_to(
        self, held: Sequence[torch.Tensor], env: Mapping[str, int]
    ) -> tuple[torch.Tensor, ...]:
        """Where the inputs of a captured step come from: tokens travel with the step record."""
        return (self._storage.step_field(TOKENS)[: env["T"]],)

    def _captures(self) -> StepGraphs:
        """What captures the decode steps of this rank."""
        return StepGraphs()

    def launch_by_launch(self) -> None:
        """Replay no graphs from now on; every rank must do the same before its first step."""
        self._graphs = None

    @property
    def run_notes(self) -> tuple[str, ...]:
        """Lines for the user about what running showed: where it went otherwise than planned."""
        found = list(dict.fromkeys(n for phase in self._phases.values() for n in phase.notes))
        if self._graphs is not None and self._graphs.refused:
            why = self._graphs.refused
            found.append(f"decode steps run launch by launch, no graph holds them: {why}")
        return tuple(found)

    def trace(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, list[Measured], dict[str, int]]:
        """Run one step, timing every group; returns the logits, the groups and the sizes."""
        executor, env = self._prepare(phase, tokens, step)
        measured = executor.trace(env)
        return self._readback.numbers(executor.output(0, env)), measured, env

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
        return self._readback.numbers(executor.output(0, env))

    def _prepare(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray],
        sources: np.ndarray | None = None,
    ) -> tuple[PhaseExecutor, dict[str, int]]:  # fmt: skip
        executor, env = self._sized(phase, tokens, step)
        self._set_step(tokens, step, sources)
        executor.input(0, env).copy_(self._storage.step_field(TOKENS)[: env["T"]])
        return executor, env

    def _sized(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
    ) -> tuple[PhaseExecutor, dict[str, int]]:
        """The executor of a phase, and the sizes of a step, which it must hold."""
        executor = self._phases[phase]
        env = {
            "T": len(tokens), "B": len(step["lengths"]), "P": step["pages"].shape[1],
            "R": len(step["sample_rows"]),
        }  # fmt: skip
        _check_sizes(executor.module, env)
        return executor, env

    def engine(self) -> "Engine":
        """An engine over this model, with the plan's tokenizer if it is here."""
        from metainfer.runtime.engine import Engine
        from metainfer.runtime.tokenizer import load_tokenizer

        path = self.plan.meta["model"]["tokenizer"]
        tokenizer = load_tokenizer(Path(path)) if path and Path(path).exists() else None
        return Engine(self, tokenizer)

    # --- modules -------------------------------------------------------------------------------

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a module of kind "module" on tensors; the results are copies.

        What forward returns as a dict or another structure comes as a tuple, in its order.
        Raises: CapacityError or TypeMismatch if sizes or types are not those compiled for.
        """
        return self._call(inputs, self._call_sizes(inputs))

    def _call_sizes(self, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
        executor = self._phases["call"]
        wanted = len(executor.flat.inputs)
        if len(inputs) != wanted:
            raise TypeMismatch(
                f"the module takes {wanted} inputs, got {len(inputs)}",
                advice=f"in order: {', '.join(self.plan.meta['model']['inputs'])}",
            )
        env: dict[str, int] = {}
        for value, tensor in zip(executor.flat.inputs, inputs, strict=True):
            _check_type(value, tensor)
            unify(value, tuple(tensor.shape), env)
        _check_sizes(executor.module, env)
        return env

    def _call(
        self, inputs: Sequence[torch.Tensor], env: Mapping[str, int]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        executor = self._phases["call"]
        for index, tensor in enumerate(inputs):
            executor.input(index, env).copy_(tensor)
        executor.run(env)
        outputs = tuple(executor.output(i, env).clone() for i in range(len(executor.flat.outputs)))
        return outputs[0] if len(outputs) == 1 else outputs

    # --- ranks ---------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this process gives the orders; one that does not only has to `follow`."""
        return True

    def follow(self) -> None:
        """Do what the leader orders until it ends; the leader itself returns at once."""

    def close(self) -> None:
        """Let go of the other ranks, if there are any."""

    def __enter__(self) -> Self:
        """Begin a block at whose end the model is closed."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the model."""
        self.close()

    # --- inside --------------------------------------------------------------------------------

    def _executors(
        self, modules: Mapping[str, Module], provider: Provider, backends: Backends,
        ranks: "Ranks | None",
    ) -> dict[str, PhaseExecutor]:  # fmt: skip
        numbers = ranks.numbers if ranks is not None else {}
        device = self.machine.device(ranks.rank if ranks is not None else 0)
        for module in modules.values():
            # Kernels trust shapes and write by address: a plan from elsewhere must not mislead.
            verify_module(module)
            check_kernels(module, device, backends)
        flats = {phase: flatten(m) for phase, m in modules.items()}
        arenas = {
            phase: plan_arena(
                flats[phase],
                m.limits(),
                workspace_bytes(m, flats[phase], device, backends),
                in_place(flats[phase], backends),
            )
            for phase, m in modules.items()
        }
        where = _own_device(device.kind)
        size = max(a.size for a in arenas.values())
        storage = Storage(
            size, _highs(modules.values()), ranks.device if ranks else where, self.max_context,
            has_step=any(m.has_step for m in modules.values()),
        )  # fmt: skip
        self._storage = storage
        store = WeightStore(provider, backends, numbers, storage.place)
        wanted = [
            (phase, name, module, weight)
            for phase, module in modules.items()
            for name, weight in flats[phase].weights.items()
        ]
        placed = store.get_all([(module, weight) for *_, module, weight in wanted])
        for (phase, name, *_), data in zip(wanted, placed, strict=True):
            storage.weights_of(phase)[name] = data
        for phase in modules:
            for name, state in flats[phase].states.items():
                if name not in storage.states:
                    storage.add_state(name, state.state, self.num_pages)
        return {
            phase: PhaseExecutor(
                module, flats[phase], arenas[phase], storage, backends, phase, self._standbys
            )
            for phase, module in modules.items()
        }

    _storage: Storage


def _own_device(kind: str) -> torch.device:
    """This process's device by its number: each thread has a current GPU of its own."""
    if kind != "gpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _vocab_size(module: Module) -> int:
    """Width of the logits; 0 for a module whose first result has none."""
    shape = module.main.outputs[0].tensor.shape
    return shape[-1].static if shape and shape[-1].is_static else 0


def _highs(modules: Iterable[Module]) -> dict[str, int]:
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


def _check_type(value: Value, tensor: torch.Tensor) -> None:
    """Refuse numbers that would be cut: whole ones may become floats, not the other way round."""
    if tensor.is_floating_point() and not value.tensor.dtype.is_float:
        raise TypeMismatch(
            f"{value.name[1:]} is {value.tensor.dtype}, got {tensor.dtype}",
            advice="convert it first, if its numbers are whole",
        )


def _set_threads(count: int, ranks: "Ranks | None", *, has_cpu_kernels: bool) -> None:
    """Take so many processor threads; 0 takes this rank's share of those that there are."""
    import os

    from metainfer.backends.cpu.program import set_num_threads

    sharing = ranks.process.local_world if ranks is not None else 1
    available = max(len(os.sched_getaffinity(0)) // sharing, 1)
    torch.set_num_threads(count or available)
    if has_cpu_kernels:
        # Always: the number that another plan was loaded with must not stay.
        set_num_threads(count or available)
