"""KV-cache compression on arrays."""
