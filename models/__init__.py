"""Models in plain PyTorch, and the specs that describe them to the compiler."""

# Model by name: the module's attribute ``spec`` is its ModelSpec. A model is added in its own
# file and in one line here.
MODELS: dict[str, str] = {
    "deepseek": "metainfer.models.deepseek",
    "qwen2_moe": "metainfer.models.qwen2_moe",
    "qwen3_moe": "metainfer.models.qwen3_moe",
    "smollm2": "metainfer.models.smollm2",
}
