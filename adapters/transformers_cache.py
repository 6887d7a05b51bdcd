"""A Hugging Face transformers cache that stores full-attention layers compressed.

``model.generate(..., cache=CompressedCache.for_model(model, "kivi-2"))`` is the whole use of it; transformers 5.23
names the argument ``past_key_values``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from kvsketch.adapters import attention_function, reporting, saving
from kvsketch.adapters.layers import SPARE_TOKENS, CompressedLayer
from kvsketch.adapters.padding import Padding
from kvsketch.adapters.torch_dlpack import array_from_tensor, beside_torch, dtype_name, match_thread_counts
from kvsketch.cache import Cache
from kvsketch.methods import Method, get_method


class CompressedCache(transformers.Cache):
    """Cache of a whole model: compressed full-attention layers, and transformers' own layers for all others.

    Make one with :meth:`for_model`, or from a dense cache with :meth:`from_dense`. The prompt's first forward is
    exact; later ones attend over pages of codes, an exact window and exact first tokens.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvsketch.adapters.transformers_cache import CompressedCache
    >>> _ = torch.manual_seed(0)
    >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = CompressedCache.for_model(model, "kivi-2", residual_length=32)
    >>> prompt = torch.randint(3, 64, (1, 200))
    >>> tokens = model.generate(prompt, cache=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    >>> cache.get_seq_length()
    207
    >>> cache.report()["total"]["encoded_tokens"]
    160
    >>> cache.nbytes < cache.report()["total"]["dense_nbytes_16"]
    True
    """

    def __init__(self, layers: list[Any], *, method: Method, options: dict[str, Any], config: Any) -> None:
        super().__init__(layers=layers)
        self.method = method
        self.options = options
        self.description = saving.describe_config(config)
        self.padding = Padding()
        #: Why the cache cannot be used until :meth:`reset`; empty while it can.
        self.broken = ""

    @classmethod
    def for_model(
        cls,
        model: transformers.PreTrainedModel,
        method: str | Method = "kivi-2",
        *,
        residual_length: int | None = None,
        sink_tokens: int | None = None,
        exact_dtype: torch.dtype | str | None = None,
        max_tokens: int | None = None,
        checked: bool | None = None,
        engine: str | None = None,
        coefficients: str = "int16",
    ) -> CompressedCache:
        """An empty cache for `model`, whose attention implementation is set to ``"kvsketch"``.

        Parameters
        ----------
        model
            A decoder of transformers. With any other cache, or none, it goes on working as before.
        method
            A preset, a method string or a :class:`kvsketch.methods.Method`.
        residual_length, sink_tokens
            Newest tokens, and first ones, that stay exact; None takes the method's own.
        exact_dtype
            Dtype in which exact tokens are kept; None keeps the model's.
        max_tokens
            Room to allocate at once, so that buffers never grow.
        checked
            Look for NaN and infinity in every key and value, and raise naming the layer. By default on a CPU alone, as
            on a CUDA device that waits for it twice a layer.
        engine
            Engine of every operation; None takes the fastest.
        coefficients
            ``"int16"``, or ``"int8"``: faster and coarser; see :func:`kvsketch.attention.attend`.

        Raises
        ------
        ValueError
            For an unknown method, a setting that does not fit the model's heads, or a model that it cannot serve:
            encoder-decoder, latent attention (MLA), no full-attention layer.
        """
        method = get_method(method).with_settings(residual_length=residual_length, sink_tokens=sink_tokens)
        exact_dtype = None if exact_dtype is None else dtype_name(exact_dtype)
        options: dict[str, Any] = {
            "exact_dtype": exact_dtype,
            "max_tokens": max_tokens,
            "checked": checked,
            "engine": engine,
            "coefficients": coefficients,
        }
        config = decoder_config(model)
        stores = {}
        kinds, arguments = get_layer_types_and_kwargs(config)
        for index in compressed_layers(config):
            settings = method.for_layer(index, len(kinds))
            _check_head_size(config.per_layer_config[index], settings.keys, settings.values)
            stores[index] = Cache(
                settings.keys,
                settings.values,
                residual_length=settings.residual_length,
                sink_tokens=settings.sink_tokens,
                name=f"layer {index}",
                **options,
            )
        cache = cls([], method=method, options=options, config=config)
        for index, (kind, layer_arguments) in enumerate(zip(kinds, arguments, strict=True)):
            store = stores.get(index)
            own = CompressedLayer(store, cache) if store is not None else None
            cache.layers.append(own or DYNAMIC_LAYER_TYPE_MAPPING[kind](**layer_arguments))
        attention_function.register()
        model.set_attn_implementation(attention_function.NAME)
        if config._attn_implementation != attention_function.NAME:
            raise ValueError(
                f"{type(model).__name__} does not let its attention be set (it does not use transformers' "
                "AttentionInterface), so it cannot use a compressed cache; use a transformers DynamicCache"
            )
        return cache

    @classmethod
    def from_dense(
        cls,
        model: transformers.PreTrainedModel,
        dense_cache: transformers.Cache,
        method: str | Method = "kivi-2",
        *,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> CompressedCache:
        """The cache that a first forward of the same prompt would have left: prefill once, compress many times.

        Parameters
        ----------
        dense_cache
            A transformers DynamicCache that `model` filled; it is not changed.
        attention_mask
            (b, n), 0 for padding, as given to that forward.
        options
            As of :meth:`for_model`.
        """
        cache = cls.for_model(model, method, **options)
        if not isinstance(dense_cache, transformers.Cache) or len(dense_cache.layers) != len(cache.layers):
            raise ValueError(
                f"dense_cache must be a transformers Cache of {len(cache.layers)} layers filled by this model, "
                f"got {dense_cache!r:.200}"
            )
        length = dense_cache.get_seq_length()
        if not length:
            raise ValueError("dense_cache is empty; run the model on the prompt with it first")
        cache.begin_forward()
        for index, (layer, dense) in enumerate(zip(cache.layers, dense_cache.layers, strict=True)):
            if isinstance(layer, CompressedLayer):
                cache._take_dense(layer, dense, index, length, attention_mask)
            elif isinstance(dense, type(layer)):
                cache.layers[index] = saving.copy_layer(dense)
            elif isinstance(layer, DynamicSlidingWindowLayer) and dense.keys is not None:
                layer.update(dense.keys, dense.values)
            else:
                raise ValueError(f"dense_cache holds a {type(dense).__name__} for layer {index}, not {layer!r}")
        return cache

    def _take_dense(
        self, layer: CompressedLayer, dense: Any, index: int, length: int, attention_mask: torch.Tensor | None
    ) -> None:
        keys, values = dense.keys, dense.values
        if keys is None or keys.shape[2] != length:
            held = 0 if keys is None else keys.shape[2]
            raise ValueError(f"dense_cache holds {held} tokens of layer {index}, which needs all {length}")
        valid = None
        if attention_mask is not None:
            if attention_mask.shape != (keys.shape[0], length):
                raise ValueError(
                    f"attention_mask must have shape (b, n) = {(keys.shape[0], length)}, "
                    f"got {tuple(attention_mask.shape)}"
                )
            valid = attention_mask.bool().cpu()
            valid = None if bool(valid.all()) else valid
        if self.padding.length == 0:
            self.padding.advance(valid, batch=keys.shape[0], new=length)
        layer.device = keys.device
        with beside_torch(layer.device):
            layer.store.append(
                array_from_tensor("keys", keys),
                array_from_tensor("values", values),
                valid=None if valid is None else array_from_tensor("attention_mask", valid),
            )
            if length > SPARE_TOKENS:
                layer.store.flush(spare=SPARE_TOKENS)
        layer.is_initialized = True

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers stored compressed, in the model's order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def nbytes(self) -> int:
        """Live bytes of all layers, those of transformers included."""
        return sum(entry["nbytes"] for entry in reporting.layer_reports(self))

    def report(self) -> dict[str, Any]:
        """What the cache holds: ``{"method": name, "layers": [a dict a layer], "total": {...}}``.

        Each dict has the keys of :meth:`kvsketch.cache.Cache.report`: tokens, bits per number of keys and values,
        bytes, the bytes of a dense cache, the engine of each operation, the kernels of the last attention. A layer of
        transformers' own reports itself as exact. In ``total`` bytes are summed, tables that layers share are counted
        once, bits are weighted by numbers, and token counts are those of one compressed layer (their mean where layers
        differ).
        """
        return {
            "method": self.method.name,
            "layers": reporting.layer_reports(self),
            "total": reporting.total_report(self),
        }

    def begin_forward(self, module: torch.nn.Module | None = None) -> None:
        """Called by the first layer of a forward, with its module: raise unless all layers hold as many positions."""
        if self.broken:
            raise RuntimeError(self.broken)
        if getattr(getattr(module, "config", None), "output_attentions", False):
            raise ValueError(attention_function.NO_WEIGHTS)
        lengths = [layer.store.length for layer in self.compressed]
        if min(lengths) != max(lengths):
            # The forward before this one stopped half-way, outside attention.
            self.roll_back(min(lengths), None)
            raise RuntimeError(
                self.broken
                or f"an earlier forward stopped half-way; the cache is back at its {min(lengths)} positions: run the "
                "forward again"
            )
        if self.options["engine"] in (None, "numba_cpu"):
            match_thread_counts()

    def roll_back(self, length: int, error: BaseException | None) -> None:
        """Undo a forward that failed: every layer back to `length` positions, or the cache unusable until reset."""
        try:
            for layer in self.layers:
                if isinstance(layer, CompressedLayer):
                    layer.roll_back(length)
                elif isinstance(layer, CacheLayerMixin):
                    excess = layer.get_seq_length() - length
                    if excess > 0:
                        layer.crop(-excess)
                elif getattr(layer, "is_initialized", False) and not layer.is_croppable:
                    raise RuntimeError(f"{layer!r} cannot be put back")
            self.padding.crop(min(length, self.padding.length))
        except (ValueError, RuntimeError) as reason:
            self.broken = f"a forward failed half-way and could not be undone ({reason}); call reset() on the cache"
            if error is not None:
                error.add_note(self.broken)

    def _check_ready(self) -> None:
        for layer in self.compressed:
            layer.check_ready()

    def reset(self) -> None:
        """Forget all tokens, keep the settings; another batch size may follow."""
        super().reset()
        self.padding = Padding()
        self.broken = ""

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` positions of every layer.

        Always exact for up to 64 of the last forward's tokens; further back as far as tokens are not encoded, or all
        of them. Raises ValueError, before any change, when codes would have to be taken apart.
        """
        self._check_ready()
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the tokens to drop, got {tokens_to_remove}; give a negative number")
        length = self.get_seq_length()
        done = False
        try:
            for layer in sorted(self.layers, key=_crop_order):
                layer.crop(tokens_to_remove)
                done = done or tokens_to_remove != 0
        except (ValueError, RuntimeError):
            if done:
                self.broken = f"crop by {-tokens_to_remove} failed half-way; call reset() on the cache"
            raise
        if tokens_to_remove:
            self.padding.crop(max(0, length + tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row r becomes the former row ``beam_idx[r]``; rows named twice do not share storage."""
        self._check_ready()
        # Read once, for all layers.
        beam_idx = beam_idx.cpu()
        super().reorder_cache(beam_idx)
        self.padding.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, its copies next to each other."""
        self._check_ready()
        batch = self.compressed[0].store.batch if self.get_seq_length() else 0
        super().batch_repeat_interleave(repeats)
        self.padding.select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`: positions, or a boolean for each row."""
        self._check_ready()
        indices = indices.cpu()
        super().batch_select_indices(indices)
        self.padding.select(indices)

    def save(self, path: str | Path) -> None:
        """Write the cache into the folder `path`: a file a layer, and ``cache.json``."""
        self._check_ready()
        saving.save(self, Path(path))

    @classmethod
    def load(cls, model: transformers.PreTrainedModel, path: str | Path) -> CompressedCache:
        """The cache that :meth:`save` wrote, for the same model; ValueError names what does not match."""
        return saving.load(cls, model, Path(path))


def _crop_order(layer: Any) -> int:
    """Layers that may refuse a crop go first, so that the others are still whole when one does."""
    if isinstance(layer, CompressedLayer):
        return 1
    forgets = isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past
    return 0 if forgets and layer.get_seq_length() >= layer.sliding_window else 2


def decoder_config(model: transformers.PreTrainedModel) -> Any:
    """Config of the part of `model` that generates text; ValueError when a compressed cache cannot serve it."""
    config = getattr(model, "config", None)
    if not isinstance(config, transformers.PretrainedConfig):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; a compressed cache serves decoder-only models")
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"{type(model).__name__} caches a latent, not keys and values (MLA, kv_lora_rank={config.kv_lora_rank}); "
            "use a transformers DynamicCache"
        )
    if getattr(config, "is_causal", True) is False:
        raise ValueError(f"{type(model).__name__} has is_causal=False; a compressed cache attends causally")
    return config


def compressed_layers(config: Any) -> list[int]:
    """Layers of a decoder that are stored compressed: full attention, with keys and values of their own.

    Sliding-window, chunked and linear-attention layers stay transformers' own, and so does a layer whose keys and
    values other layers read.
    """
    kinds = get_layer_types_and_kwargs(config)[0]
    shared = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    found = [
        i for i, (kind, mode) in enumerate(zip(kinds, shared, strict=True)) if kind == "full_attention" and not mode
    ]
    if not found:
        raise ValueError(
            f"model has no full-attention layer to compress (its layers are {sorted(set(kinds))}); "
            "use a transformers DynamicCache"
        )
    return found


def _check_head_size(config: Any, keys: Any, values: Any) -> None:
    """Raise ValueError at once when a codec does not fit the head size that the config tells."""
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if size is not None:
        keys.check_width("keys", size)
        values.check_width("values", size)
