"""load: a plan becomes something that runs: a language model behind an engine, or a callable."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metainfer.backends.registry import installed
from metainfer.backends.sources import check_fingerprints
from metainfer.hardware.detect import detect_machine
from metainfer.hardware.machine import Machine, matches
from metainfer.ir.errors import CheckpointError, PlanError
from metainfer.ir.plan import Plan
from metainfer.runtime.alternates import Alternates
from metainfer.runtime.checkpoint import Checkpoint, TensorSource, open_checkpoint
from metainfer.runtime.communicator import apply_settings
from metainfer.runtime.free_memory import check_free_memory
from metainfer.runtime.model import LoadedModel
from metainfer.runtime.ranked import RankedModel
from metainfer.runtime.ranks import check_world, join, launched
from metainfer.runtime.self_test import self_test
from metainfer.runtime.weights import (
    CheckpointProvider,
    Provider,
    state_dict_provider,
)

__all__ = ["LoadedModel", "load"]

Weights = Mapping[str, Any] | Provider | str | Path | None


def load(
    plan: Plan | str | Path,
    weights: Weights = None,
    *,
    allow_machine_mismatch: bool = False,
    allow_checkpoint_mismatch: bool = False,
    num_threads: int = 0,
    time_limit_s: float = 60.0,
) -> LoadedModel:
    """Load a plan and its weights.

    A plan of several ranks is loaded by as many processes, which torchrun (or `metainfer run
    --nproc N`) starts; each loads its own part. In all but the first, call `follow`::

        with metainfer.load(plan) as model:
            if model.is_leader:
                print(model.engine().generate([prompt]))
            model.follow()

    Args:
        plan: a Plan, or the folder of one.
        weights: where tensors come from: a checkpoint's path, a state_dict, or a function from
            name to array; None takes the checkpoint that the plan names.
        allow_machine_mismatch: run although this machine lacks what the plan counts on.
        allow_checkpoint_mismatch: take another checkpoint of the same model (a fine-tune, say) than
            the plan was compiled with; names, sizes and formats must agree nevertheless.
        num_threads: CPU threads; 0 takes this process's share of the processors given to it.
        time_limit_s: for several ranks: seconds that they wait for each other within a step.

    Raises: PlanError for a plan of another machine, other kernels, another checkpoint or another
        number of ranks; CapacityError where a GPU has too little memory free, before weights are
        read; CheckpointError for weights that do not fit the plan; RankError if
        another rank failed, or a collective does on this machine.
    """
    found = plan if isinstance(plan, Plan) else Plan.read(Path(plan))
    machine = Machine.from_dict(dict(found.meta["machine"]))
    check_fingerprints(dict(found.meta["kernel_sources"]))
    process = launched()
    rank = process.local_rank if process is not None else 0
    check_machine(machine, rank, allow_mismatch=allow_machine_mismatch)
    if process is None or process.world == 1:
        check_world(found.layout, 1)
        if machine.device(0).kind == "gpu":
            check_free_memory(found, 0, torch.cuda.current_device())
        provider = _provider(found, weights, allow_checkpoint_mismatch)
        return LoadedModel(found, machine, provider, installed(), num_threads)
    settings = apply_settings(machine, os.environ)
    kind = machine.device(0).kind
    ranks = join(found.layout, found.hash, process, kind, time_limit_s, machine.topology())
    try:
        if kind == "gpu":
            check_free_memory(found, ranks.stage, torch.cuda.current_device())
        is_exact = bool(found.meta["options"].get("exact"))
        modules = {phase: found.module(phase, ranks.stage) for phase in found.phases}
        tested = self_test(ranks, modules, Alternates(machine, installed(), is_exact))
        tested = replace(tested, notes=(*settings, *tested.notes))
        provider = _provider(found, weights, allow_checkpoint_mismatch)
        return RankedModel(found, machine, provider, installed(), num_threads, ranks, tested)
    except BaseException:
        ranks.close()
        raise


def check_machine(planned: Machine, local_rank: int = 0, *, allow_mismatch: bool = False) -> None:
    """Require the machine that a plan counts on.

    Args:
        planned: the plan's.
        local_rank: of this process on its host.
        allow_mismatch: whether all but the GPU itself may lack what the plan counts on.

    Raises: PlanError naming what is missing.
    """
    _check_gpus(planned, local_rank)
    if not allow_mismatch:
        _check_differences(planned)


def _check_gpus(planned: Machine, local_rank: int) -> None:
    """Require the GPU of this rank: no permission makes up for it."""
    if planned.device(0).kind != "gpu":
        return
    if not torch.cuda.is_available():
        raise PlanError(
            f"the plan is for {planned.name}, here is no GPU",
            advice="compile for this machine (--hw cpu), or run the plan where its GPUs are",
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise PlanError(
            f"rank {local_rank} of this host has no GPU: here are {count}",
            advice="one rank takes one GPU: compile for fewer, or show the processes more of them",
        )


def _check_differences(planned: Machine) -> None:
    kind = planned.device(0).kind
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
