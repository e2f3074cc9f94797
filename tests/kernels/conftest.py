"""Which operations the tests run on."""

import pytest
import torch

from loraplex.kernels import Ops, TorchOps, choose_ops


def native_ops() -> Ops:
    """The native CPU operations, or skip where this machine cannot run them."""
    choice = choose_ops(torch.device("cpu"), torch.bfloat16, num_threads=2)
    if choice.note:
        pytest.skip(choice.note)
    return choice.ops


@pytest.fixture(params=["torch-float32", "torch-bfloat16", "native-bfloat16"])
def ops_and_dtype(request: pytest.FixtureRequest) -> tuple[Ops, torch.dtype]:
    name, dtype = request.param.split("-")
    return (TorchOps() if name == "torch" else native_ops()), getattr(torch, dtype)
