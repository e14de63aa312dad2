"""Checkpoints of fp8 and fp4 weights, written by loops of torch that share nothing with ours."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp8_blocks(
    w: torch.Tensor, height: int, width: int, *, powers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and values of a matrix in blocks; ``powers`` makes scales powers of two."""
    rows, columns = -(-w.shape[0] // height), -(-w.shape[1] // width)
    codes = torch.zeros(w.shape, dtype=torch.float8_e4m3fn)
    scales, values = torch.zeros(rows, columns), torch.zeros(w.shape)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale = w[at].abs().max() / 448
            scale = 2.0 ** torch.ceil(torch.log2(scale)) if powers else scale
            scales[i, j] = scale
            codes[at] = (w[at] / scale).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scale
    return codes, scales, values


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [..., K/2], exponents [..., K/32] and values of rows in groups of 32."""
    groups = w.reshape(*w.shape[:-1], -1, 32)
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6))
    ratio = groups / 2.0**exponent
    index = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[index] * ratio.sign() * 2.0**exponent).reshape(w.shape)
    nibbles = (index + 8 * (ratio < 0)).to(torch.uint8).reshape(*w.shape[:-1], -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, (exponent[..., 0] + 127).to(torch.uint8), values


def deepseek(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """FP8 in blocks of 32 x 32, a stand-in for 128 x 128 at the sizes of tests."""
    codes, scales, values = fp8_blocks(w, 32, 32)
    return {name: codes, f"{name}_scale_inv": scales}, values


def ue8m0(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same with exponents as scales, named as in DeepSeek V4."""
    codes, scales, values = fp8_blocks(w, 32, 32, powers=True)
    stem = name.removesuffix(".weight")
    return {name: codes, f"{stem}.scale": scales.to(torch.float8_e8m0fnu)}, values


def by_tensor(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for the tensor, and a static one for activations."""
    codes, scales, values = fp8_blocks(w, *w.shape)
    stem = name.removesuffix(".weight")
    extra = {f"{name}_scale": scales.reshape(()), f"{stem}.input_scale": torch.tensor(0.5)}
    return {name: codes, **extra}, values


def by_row(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale a row, in bf16."""
    codes, scales, _ = fp8_blocks(w, 1, w.shape[1])
    scales = scales.to(torch.bfloat16)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def packed(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """MXFP4 in bytes of two codes."""
    if w.shape[-1] % 32:
        return {name: w}, w
    bytes_, exponents, values = mxfp4(w)
    return {f"{name}_packed": bytes_, f"{name}_scale": exponents}, values


def nvfp4(w: torch.Tensor, whole: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [N, K/2], scales [N, K/16] in e4m3 for a given one of the tensor, and values."""
    groups = w.reshape(w.shape[0], -1, 16)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    ratio = groups / (scales.float() * whole)[..., None]
    index = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[index] * ratio.sign() * scales.float()[..., None] * torch.tensor(whole)
    nibbles = (index + 8 * (ratio < 0)).to(torch.uint8).reshape(w.shape[0], -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scales, values.reshape(w.shape)


def modelopt(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """NVFP4 with a factor for the tensor, and a static scale for activations."""
    if w.shape[-1] % 16:
        return {name: w}, w
    whole = (w.abs().max() / (6 * 448)).item()
    bytes_, scales, values = nvfp4(w, whole)
    stem = name.removesuffix(".weight")
    extra = {f"{name}_scale_2": torch.tensor(whole), f"{stem}.input_scale": torch.tensor(0.5)}
    return {name: bytes_, f"{name}_scale": scales, **extra}, values


def nvfp4_packed(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """NVFP4 with a divisor for the tensor: a power of two, so that both ways round alike."""
    if w.shape[-1] % 16:
        return {name: w}, w
    power = 2.0 ** math.ceil(math.log2(w.abs().max().item() / (6 * 448)))
    bytes_, scales, values = nvfp4(w, power)
    made = {f"{name}_packed": bytes_, f"{name}_scale": scales}
    divisor = {f"{name}_global_scale": torch.tensor([1 / power])}
    return {**made, **divisor}, values


Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
WRITERS: dict[str, Writer] = {
    "deepseek": deepseek,
    "ue8m0": ue8m0,
    "by_tensor": by_tensor,
    "by_row": by_row,
    "packed": packed,
    "modelopt": modelopt,
    "nvfp4_packed": nvfp4_packed,
}
CONFIGS: dict[str, dict[str, object]] = {
    "deepseek": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "ue8m0": {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    "by_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "by_row": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "packed": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nvfp4_packed": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}


def scale_folder(plain: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """Write a folder's linears in a format, and a twin with the values that they then have.

    Returns: the folder of codes and scales, the folder of plain numbers.
    """
    scaled, twin = folder / f"{kind}_codes", folder / f"{kind}_values"
    shutil.copytree(plain, scaled)
    shutil.copytree(plain, twin)
    codes: Tensors = {}
    values: Tensors = {}
    for name, w in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made, wide = WRITERS[kind](name, w.float())
            codes |= made
            values[name] = wide.contiguous()
        else:
            codes[name] = values[name] = w
    save_file(codes, scaled / "model.safetensors")
    save_file(values, twin / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (scaled / "config.json").write_text(json.dumps(config))
    return scaled, twin
