"""Ranks of a command: started through torch's elastic agent, or joined where torchrun started them.

Only rank 0 prints results. A rank that fails writes its error where the agent finds it; the
command ends with the error of the rank that failed first.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from metainfer.cli.errors import COMMAND, FAULT, INTERRUPTED
from metainfer.ir.errors import MetainferError, PlanError, RankError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# A rank that only noticed that another failed lets that one be heard first.
_ECHO_WAIT_S = 1.0
# How often the launcher looks after its ranks, and how long one may outlive another.
_LOOK_S = 0.5
_STUCK_S = 6.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RUN = "metainfer-ranks-"


def own_rank() -> int | None:
    """This process's rank, None if it is none."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() and "WORLD_SIZE" in os.environ else None


def is_quiet() -> bool:
    """Whether another rank does the talking."""
    return bool(own_rank())


def starts_ranks(plan: Path, nproc: int | None) -> bool:
    """Whether this process only starts the ranks of a plan.

    Raises: PlanError if the plan is for another number of ranks, or ranks were not asked for.
    """
    count, layout = _planned(plan)
    if own_rank() is not None:
        return False
    if nproc is None and count > 1:
        raise PlanError(
            f"the plan at {plan} is for {count} ranks ({layout}), this is one process",
            advice=f"start them: add --nproc {count}, or run it under torchrun",
        )
    if nproc is not None and nproc != count:
        raise PlanError(
            f"the plan at {plan} is for {count} ranks ({layout}), --nproc asks for {nproc}",
            advice=f"give --nproc {count}, or compile for {nproc} ranks (--tp, --dp, --pp)",
        )
    return count > 1


def _planned(plan: Path) -> tuple[int, str]:
    """Ranks that a plan says it is for; a damaged one is refused when it is loaded."""
    try:
        sizes = json.loads((plan / "plan.json").read_text())["ranks"]
        layout = " ".join(f"{n}={sizes[n]}" for n in ("pp", "dp", "tp", "ep") if sizes[n] > 1)
        return int(sizes["count"]), layout or "one rank"
    except (OSError, ValueError, KeyError, TypeError):
        return 1, "one rank"


def start_ranks(ctx: typer.Context, plan: Path) -> None:
    """Run this very command as the ranks of a plan, and wait for all of them.

    Raises: RankError or typer.Exit with what the rank that failed first said.
    """
    import tempfile

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count, _ = _planned(plan)
    _silence("torch.distributed.elastic")
    with tempfile.TemporaryDirectory(prefix=_RUN) as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=Path(folder).name,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            max_restarts=0, monitor_interval=0.1, logs_specs=DefaultLogsSpecs(log_dir=folder),
        )  # fmt: skip
        command = ("-m", "metainfer", *ctx.meta[COMMAND])
        with _ended_together(config.run_id, count):
            try:
                elastic_launch(config, sys.executable)(*command)
            except ChildFailedError as error:
                _report(error.failures)
            except SignalException as error:
                raise KeyboardInterrupt from error


def _silence(logger: str) -> None:
    """What goes wrong is said once, by us."""
    import logging

    for name in logging.root.manager.loggerDict:
        if name.startswith(logger):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _ended_together(run_id: str, count: int) -> Iterator[None]:
    """See to it that soon after one rank ended all have: one that is stuck is killed."""
    is_over = threading.Event()

    def watch() -> None:
        most = 0
        while not is_over.wait(_LOOK_S):
            alive = _workers(run_id)
            most = max(most, len(alive))
            if most == count and len(alive) < count:
                break
        if is_over.wait(_STUCK_S):
            return
        for worker in _workers(run_id):
            os.kill(worker, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _workers(run_id: str) -> list[int]:
    """Processes of this run that this one started; none where the system does not tell."""
    found = []
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if f"TORCHELASTIC_RUN_ID={run_id}".encode() in environ.split(b"\0"):
                found.append(pid)
    return found


def _report(failures: "Mapping[int, ProcessFailure]") -> None:
    """Print the error of the rank that failed first, and leave with its exit code."""
    rank, first = min(failures.items(), key=lambda item: _precedence(item[1]))
    if first.exitcode < 0:
        raise RankError(
            f"rank {rank} was ended by signal {-first.exitcode} ({first.signal_name()})",
            advice="if nobody sent it: it ran out of memory (see dmesg), or crashed",
        )
    sys.stderr.write(f"{_said(first) or f'error: rank {rank} failed without a word'}\n")
    raise typer.Exit(first.exitcode)


def _precedence(failure: "ProcessFailure") -> tuple[int, int]:
    """Its own error before a signal, before what others noticed of it, before being told to end."""
    if failure.exitcode == -signal.SIGTERM:
        return 3, failure.timestamp
    if failure.exitcode < 0:
        return 1, failure.timestamp
    return (2 if _extra(failure).get("is_echo") else 0), failure.timestamp


def _extra(failure: "ProcessFailure") -> Mapping[str, Any]:
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _said(failure: "ProcessFailure") -> str:
    message = failure.error_file_data.get("message")
    return str(message.get("message", "")) if isinstance(message, dict) else ""


@contextmanager
def as_rank() -> Iterator[None]:
    """Run the part of a command that every rank runs; its errors go where the agent finds them.

    Raises: whatever the block raises, if this process is no rank.
    """
    rank = own_rank()
    if rank is None:
        yield
        return
    _end_with_launcher()
    from metainfer.runtime.watch import leave

    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        leave("", INTERRUPTED)
    except MetainferError as error:
        is_echo = isinstance(error, RankError) and error.is_echo
        if is_echo:
            time.sleep(_ECHO_WAIT_S)
        leave(f"error: {error.render()}", error.exit_code, is_echo=is_echo)
    except Exception as error:
        line = (str(error).splitlines() or ["no message"])[0]
        leave(
            f"internal error of rank {rank}: {type(error).__name__}: {line}", FAULT, is_echo=False
        )


def _end_with_launcher() -> None:
    """Ask the system to end this process when the launcher that started it is gone."""
    if not os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN):
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
