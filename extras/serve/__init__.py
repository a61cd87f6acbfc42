"""An HTTP server that speaks OpenAI's completions, with a page: `python -m extras.serve`.

Without this folder nothing else is missing.
"""
