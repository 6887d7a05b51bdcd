"""KV-cache compression for language models, on arrays: sketches, grouped integers, and caches made of them.

The array functions take NumPy arrays (CuPy ones where an engine offers it) and give arrays of the same library. A model
of Hugging Face transformers is served by :mod:`kvsketch.adapters.transformers_cache`. Importing this package loads
NumPy only.
"""

from kvsketch import bounds
from kvsketch._dispatch import engine_for
from kvsketch.attention import CacheView, attend
from kvsketch.bitpack import pack_codes, pack_signs, unpack_codes, unpack_signs
from kvsketch.cache import Cache
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.environment import show_config
from kvsketch.kivi import GroupedCodes, dequantize_groups, key_scores, quantize_groups, weighted_values
from kvsketch.layout import page_layout
from kvsketch.methods import METHODS, LayerSettings, Method, get_method
from kvsketch.pages import decode_keys, decode_values, encode_keys, encode_values, select_channels
from kvsketch.qjl import SketchedKeys, select_outlier_channels, sketch_keys, sketch_scores
from kvsketch.rotation import Projection, draw_projection, hadamard_block, hadamard_transform

__all__ = [
    "METHODS",
    "Cache",
    "CacheView",
    "Exact",
    "GroupedCodes",
    "GroupedInts",
    "LayerSettings",
    "Method",
    "Projection",
    "SignSketch",
    "SketchedKeys",
    "TokenInts",
    "attend",
    "bounds",
    "decode_keys",
    "decode_values",
    "dequantize_groups",
    "draw_projection",
    "encode_keys",
    "encode_values",
    "engine_for",
    "get_method",
    "hadamard_block",
    "hadamard_transform",
    "key_scores",
    "pack_codes",
    "pack_signs",
    "page_layout",
    "quantize_groups",
    "select_channels",
    "select_outlier_channels",
    "show_config",
    "sketch_keys",
    "sketch_scores",
    "unpack_codes",
    "unpack_signs",
    "weighted_values",
]
