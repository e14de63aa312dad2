"""Plain PyTorch models and their ModelSpec."""
