"""Weights and shards of other projects: GGUF out, nanoGPT's and llm.c's files in.

Without this folder extras.to_gguf, nanogpt_bin, nanogpt_ckpt and llmc have nothing to run.
"""
