"""From files to token shards: sources, formats, census, vocabulary, folder.

Without this folder prepared data sets still train; nothing can be prepared.
"""
