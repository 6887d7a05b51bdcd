"""The readable CUDA engine: every operation of the reference as kernels in Numba, for CuPy arrays.

Kernels are written one thread a number where that does, and are made to be read, not to be fast: ``cuda_raw`` is the
engine for speed. They use shared memory and barriers but no warp operations, so that Numba's simulator runs them.
Compiling needs ``numba-cuda`` with NVVM (``pip install 'kvsketch[cuda13]'``).
"""

#: What this engine offers: all that the reference does.
OPERATIONS = (
    *("bitpack.pack_signs", "bitpack.unpack_signs", "bitpack.pack_codes", "bitpack.unpack_codes"),
    "rotation.hadamard_transform",
    *("qjl.select_outlier_channels", "qjl.sketch_keys", "qjl.sketch_scores"),
    *("kivi.quantize_groups", "kivi.dequantize_groups", "kivi.key_scores", "kivi.weighted_values"),
    *("pages.encode_keys", "pages.encode_values", "pages.decode_keys", "pages.decode_values"),
    *("pages.select_channels", "attention.attend", "palu.attend"),
)
