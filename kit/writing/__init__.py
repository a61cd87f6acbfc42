"""Writing many texts: windows that slide, batches of ragged prompts, sessions, drafts.

Without session.py sample.py has no --interactive; without drafts.py it writes a token a step.
"""
