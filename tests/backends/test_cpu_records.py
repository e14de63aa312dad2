"""Every C++ kernel, through packing, arena and executor, against the reference of its group.

A new kernel needs no new test: a sample of its op (``tests/op_samples.py``) or the rule that forms
its group gives the graphs.
"""

from itertools import islice

import numpy as np
import pytest
from group_runs import execute, groups_for
from pass_oracle import example_for, sizes_of
from torch_samples import TOLERANCE

from metainfer.backends.cpu.build import available
from metainfer.backends.kernel import Kernel
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import difference
from metainfer.ir.interpret import Data

pytestmark = pytest.mark.skipif(not available()[0], reason="no C++ compiler")

KERNELS = [k for k in installed().kernels.all() if k.backend == "cpu"]
_MOST = 3  # groups tried with a kernel
# What a kernel states is the rounding of one operand; a sum of few products shows more of it.
_SUMS = 4


def assert_near(found: Data, wanted: Data, kernel: Kernel) -> None:
    assert isinstance(found, np.ndarray)
    assert isinstance(wanted, np.ndarray)
    if wanted.dtype.kind in "iub":
        np.testing.assert_array_equal(found, wanted)
    else:
        assert difference(found, wanted) <= TOLERANCE["f32"] + _SUMS * kernel.error


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_computes_its_group(kernel: Kernel) -> None:
    groups = list(islice(groups_for(kernel), _MOST))
    assert groups, f"no sample of {kernel.op} and no rule makes a group that {kernel.name} takes"
    for before, after in groups:
        for seed, env in enumerate(sizes_of(before)):
            example = example_for(before, env, seed)
            wanted, found = example.run(before), execute(after, example, env)
            for a, b in zip(found.outputs, wanted.outputs, strict=True):
                assert_near(a, b, kernel)
            assert found.states.keys() == wanted.states.keys()
            for name, fields in wanted.states.items():
                for field, array in fields.items():
                    assert_near(found.states[name][field], array, kernel)
