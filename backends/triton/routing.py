"""Launches of the choice of experts by corrected scores."""

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.attention import power_above
from metainfer.backends.triton.launch import Launch

MOST_EXPERTS = 1024  # numbers of a program's tile


def choose_experts(call: TorchCall) -> list[Launch]:
    """One program for each token.

    Shapes: logits [T, N], correction [N] -> shares f32 [T, K], numbers i64 [T, K].
    """
    # Imported where it is launched: templates need Triton.
    from metainfer.backends.triton.templates.choose_experts import choose_experts as function

    logits, correction = call.inputs
    shares, ids = call.outputs
    tokens, num = logits.shape
    if tokens == 0:
        return []
    k, groups = int(call.attrs["k"]), int(call.attrs["groups"])
    arguments = {
        "logits": logits, "correction": correction, "shares": shares, "ids": ids,
        "scaling": float(call.attrs["scaling"]), "row_stride": logits.stride(0),
    }  # fmt: skip
    constants = {
        "N": num, "EACH": num // groups, "MEMBERS": power_above(num // groups),
        "NUM_GROUPS": groups, "GROUPS": power_above(groups),
        "CHOSEN": int(call.attrs["chosen_groups"]), "K": k, "PLACES": power_above(k),
        "RENORMALISE": bool(call.attrs["renormalise"]),
    }  # fmt: skip
    warps = 1 if tile_of(num, groups) <= 256 else 4
    return [Launch(function, (tokens,), arguments, constants, warps, 1)]


def tile_of(num: int, groups: int) -> int:
    """Numbers of a program's tile: groups and their members padded."""
    return power_above(groups) * power_above(num // groups)
