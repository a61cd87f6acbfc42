"""How fast is decoding? `python -m bench.decode`, side by side with Hugging Face and llama.cpp."""
