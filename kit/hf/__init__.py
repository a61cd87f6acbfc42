"""Hugging Face: GPT-2's weights from the hub, models and tokenizers exported to transformers.

Without this folder there are no --init_from=gpt2* and no `python -m kit.hf`.
"""
