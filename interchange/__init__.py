"""Models in and out: Hugging Face folders (config.json, safetensors, tokenizer) and this trainer's checkpoints."""
