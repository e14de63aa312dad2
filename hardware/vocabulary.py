"""The words a hardware file may use: features of a device, and names of its rates.

A word outside these lists is an error with the nearest one named, so that a misspelt feature does
not silently switch a kernel off. A vendor's own features carry a dot ("hygon.mmac") and are free.
"""

import difflib

from metainfer.ir.dtypes import FP8_BLOCK, MXFP4, MXFP8, NVFP4, SCALAR_NAMES

FEATURES: dict[str, str] = {
    "avx2": "256-bit integer and float vectors",
    "fma": "fused multiply-add on vectors",
    "f16c": "conversion between f16 and f32 vectors",
    "avx512f": "512-bit vectors",
    "avx512_vnni": "u8 x s8 dot product into i32, 512-bit",
    "avx_vnni": "u8 x s8 dot product into i32, 256-bit",
    "avx512_bf16": "bf16 dot product into f32",
    "amx_int8": "tiles, i8",
    "amx_bf16": "tiles, bf16",
    "neon": "128-bit vectors of ARM",
    "i8mm": "i8 matrix product of ARM",
    "f16_mma": "matrix units take f16 operands",
    "bf16_mma": "matrix units take bf16 operands",
    "tf32_mma": "matrix units take f32 operands rounded to tf32",
    "i8_mma": "matrix units take i8 operands",
    "fp8_mma": "matrix units take OCP e4m3 and e5m2 operands",
    "fp8_fnuz_mma": "matrix units take the FNUZ variants of e4m3 and e5m2, not the OCP ones",
    "fp4_mma": "matrix units take e2m1 operands",
    "mma_block_scale": "matrix units apply block scales (mxfp8, mxfp4, nvfp4) themselves",
    "wgmma": "warpgroup matrix product with operands in shared memory",
    "tcgen05": "matrix product issued by one thread, accumulators in tensor memory",
    "mfma": "matrix product of a wavefront (AMD)",
    "cp_async": "asynchronous copy from device to shared memory",
    "tma": "tensor copies by a copy engine of the multiprocessor",
    "cluster": "thread block clusters",
    "tma_multicast": "one tensor copy into several blocks of a cluster, with gain",
    "early_launch": "a kernel may start before the one in front of it ends, and waits by itself",
    "nvls": "reductions inside the switch",
    "cuda": "runs CUDA programs",
    "hip": "runs HIP programs",
    "triton": "Triton compiles for it",
}

# Forms of the matrix units that have a rate of their own beside the scalar types of the IR.
SCALED_RATES: dict[str, str] = {
    "tf32": "f32 operands rounded to tf32, f32 sums",
    "mxfp8": "e4m3, block scale applied by the unit (32 elements, e8m0)",
    "mxfp4": "e2m1, block scale applied by the unit (32 elements, e8m0)",
    "nvfp4": "e2m1, block scale applied by the unit (16 elements, e4m3)",
    "f16_acc16": "f16 operands, f16 sums: not usable for long sums, never a stand-in for f16",
}
RATE_NAMES: tuple[str, ...] = (*SCALAR_NAMES, *SCALED_RATES)

# A block format is computed at the rate of this name.
BLOCK_RATES: dict[str, str] = {
    str(MXFP8): "mxfp8",
    str(MXFP4): "mxfp4",
    str(NVFP4): "nvfp4",
    str(FP8_BLOCK): "f8e4m3",
}

# Where a device states no rate for a type, the next one of its row is taken: first a form that the
# same units run no faster, then the type that the operands would be widened to.
RATE_FALLS: dict[str, tuple[str, ...]] = {
    "f32": (),
    "tf32": ("f32",),
    "f64": (),
    "bf16": ("f32",),
    "f16": ("f32",),
    "i8": ("f32",),
    "u8": ("i8", "f32"),
    "i4": ("i8", "f32"),
    "u4": ("i8", "f32"),
    "f8e4m3": ("bf16", "f32"),
    "f8e5m2": ("f8e4m3", "bf16", "f32"),
    "mxfp8": ("f8e4m3", "bf16", "f32"),
    "f4e2m1": ("bf16", "f32"),
    "mxfp4": ("bf16", "f32"),
    "nvfp4": ("bf16", "f32"),
}

# Settings of NCCL and RCCL that a machine may want, and a plan may carry. What names files or code
# to load (plugins, topology files) is none: a plan that is loaded runs no code of its own.
COMMUNICATOR: dict[str, str] = {
    "NCCL_P2P_LEVEL": "how far apart devices may be that reach each other's memory",
    "NCCL_P2P_DISABLE": "no device reaches another's memory",
    "NCCL_SHM_DISABLE": "no exchange through shared host memory",
    "NCCL_SHM_USE_CUDA_MEMCPY": "copy engines for the exchange through host memory",
    "NCCL_MIN_NCHANNELS": "least number of channels, each a block of every kernel",
    "NCCL_MAX_NCHANNELS": "largest number of channels",
    "NCCL_BUFFSIZE": "bytes of a channel's buffer",
    "NCCL_NTHREADS": "threads of a block",
    "NCCL_ALGO": "algorithms to choose from",
    "NCCL_PROTO": "protocols to choose from",
    "NCCL_NVLS_ENABLE": "reductions inside the switch",
    "NCCL_CUMEM_ENABLE": "buffers by the driver's virtual memory",
    "NCCL_CROSS_NIC": "rings that change network cards",
    "NCCL_IB_DISABLE": "no InfiniBand or RoCE",
    "NCCL_NET_GDR_LEVEL": "how far a network card may be from a device that it reads",
    "NCCL_SOCKET_IFNAME": "network interfaces for sockets",
    "NCCL_IB_HCA": "network cards for InfiniBand or RoCE",
}


def nearest(word: str, words: list[str]) -> str:
    """Return advice naming the nearest of ``words``, or all of them if none is near."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(words)}"


def is_feature(name: str) -> bool:
    """Whether a feature name is known, or is a vendor's own (with a dot)."""
    return name in FEATURES or "." in name
