"""Logits on their way from a device to the host: through pinned memory, at the link's rate."""

import numpy as np
import torch


class Readback:
    """Hands out logits as float32 on the host.

    Pageable memory is copied to in small steps: the logits of 64 sequences over a vocabulary of
    150,000 take tens of milliseconds so, a few times a decode step.

    Args:
        device: where logits come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._buffers: dict[int, torch.Tensor] = {}

    def numbers(self, logits: torch.Tensor, number: int = 0) -> np.ndarray:
        """Logits on the host, valid until the next ones of the same number.

        Args:
            logits: [R, V], ready on the current stream.
            number: of the replica that they are from.

        Shapes: f32 [R, V].
        """
        wide = logits.float()
        if not self._is_gpu:
            found: np.ndarray = wide.numpy()
            return found
        held = self._buffer(number, wide.numel()).view(wide.shape)
        held.copy_(wide, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        read: np.ndarray = held.numpy()
        return read

    def _buffer(self, number: int, size: int) -> torch.Tensor:
        held = self._buffers.get(number)
        if held is None or held.numel() < size:
            # Pinning takes milliseconds: rooms grow by doubling.
            held = torch.empty(1 << (size - 1).bit_length(), dtype=torch.float32, pin_memory=True)
            self._buffers[number] = held
        return held[:size]
