"""Settings of the communication library come from the machine file, are said, and load no code."""

from dataclasses import replace
from pathlib import Path

import pytest
import rank_tasks
from hf_checkpoints import make_checkpoint
from rank_pool import RankPool

import metainfer
from metainfer.hardware.load import load_machine
from metainfer.hardware.machine import CommunicatorOption
from metainfer.ir.errors import PlanError
from metainfer.runtime.communicator import apply_settings


def test_what_is_not_set_is_set_and_what_a_user_set_stays() -> None:
    # B72: defaults tuned elsewhere halve the bandwidth of a machine of two sockets.
    machine = load_machine("8xpcie")
    environ = {"NCCL_P2P_LEVEL": "PHB"}
    level, channels = apply_settings(machine, environ)
    assert environ == {"NCCL_P2P_LEVEL": "PHB", "NCCL_MIN_NCHANNELS": "8"}
    assert level.startswith("NCCL_P2P_LEVEL=PHB stays as it was set; 8xpcie asks for SYS: ")
    assert channels.startswith("NCCL_MIN_NCHANNELS=8: 22.2 -> 37.6 GB/s")


def test_a_plan_cannot_make_the_library_load_code() -> None:
    evil = CommunicatorOption("NCCL_NET_PLUGIN", "/tmp/evil.so", "fast")
    machine = replace(load_machine("8xpcie"), communicator=(evil,))
    environ: dict[str, str] = {}
    with pytest.raises(PlanError, match="sets NCCL_NET_PLUGIN, which is not known"):
        apply_settings(machine, environ)
    assert environ == {}


BOX = """extends = "2xcpu"
name = "box"
[[communicator]]
name = "NCCL_BUFFSIZE"
value = "33554432"
reason = "larger buffers pay without peer access"
"""


def test_every_rank_has_the_settings_and_says_so(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_text(BOX)
    model = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    metainfer.compile(
        str(model), str(tmp_path / "box.toml"), tp=2, out=tmp_path / "plan", max_tokens=16,
        max_sequences=2, max_context=32,
    )  # fmt: skip
    for notes, held in pool.outcomes(
        2, rank_tasks.notes_and_setting, tmp_path / "plan", "NCCL_BUFFSIZE"
    ):
        assert held == "33554432"
        assert notes == ("NCCL_BUFFSIZE=33554432: larger buffers pay without peer access",)
