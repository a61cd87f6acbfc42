"""What only some need: tokenizers and importers beside the core, with requirements of their own."""
