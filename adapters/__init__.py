"""Bridges to other libraries: torch through DLPack, and Hugging Face transformers."""
