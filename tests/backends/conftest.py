"""Random operands of a test do not depend on which tests ran before it in the same process."""

import numpy as np
import pytest
import torch_samples
import triton_groups


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    for module in (torch_samples, triton_groups, request.module):
        generator = getattr(module, "RNG", None)
        if generator is not None:
            generator.bit_generator.state = np.random.default_rng(5).bit_generator.state
