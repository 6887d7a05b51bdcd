"""The cache of a model converted by Palu: latents, stored exact or in few bits, and positions where there is RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvsketch.adapters.attention_function import attend_rows_alone, dense_attention
from kvsketch.adapters.layers import SPARE_TOKENS, CompressedLayer
from kvsketch.adapters.palu_rope import RopeTable
from kvsketch.adapters.palu_store import LatentStore
from kvsketch.adapters.torch_dlpack import array_from_tensor, beside_torch, tensor_from_array
from kvsketch.adapters.transformers_cache import CompressedCache, decoder_config
from kvsketch.codecs import Codec, Exact, TokenInts
from kvsketch.methods import LayerSettings, Method
from kvsketch.palu import KeyNorm, Reconstruction, attend

if TYPE_CHECKING:
    from kvsketch.adapters.padding import Step
    from kvsketch.adapters.palu_attention import NewTokens, PaluAttention

_UNSET: Any = object()


def latent_codec(bits: int | None, group: int | None = None) -> Codec:
    """How latents of `bits` bits are stored, `group` of them a scale and zero (None: all of a slice); None: exact."""
    if bits is None:
        if group is not None:
            raise ValueError(f"latent_group={group} needs latent_bits; give both, or neither")
        return Exact()
    return TokenInts(bits, group)


class PaluLayer(CompressedLayer):
    """Latents of one full-attention layer, brought by :class:`~kvsketch.adapters.palu_attention.PaluAttention`."""

    store: Any
    owner: Any
    #: What keys and values are rebuilt with, on the device of the tokens held.
    _matrices: tuple[list[Reconstruction], KeyNorm | None] | None = None

    def __init__(self, store: LatentStore, owner: PaluCache) -> None:
        # A LatentStore does all that a layer asks of a Cache.
        super().__init__(store, owner)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"PaluLayer({self.store!r})"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse keys and values: they come from a layer that was not converted."""
        raise ValueError(
            f"{self.store.name} of a PaluCache was given keys and values by a model that is not converted; use the "
            "model that PaluCache.for_model was called with"
        )

    def attend_latents(self, module: PaluAttention, new: NewTokens, mask: torch.Tensor | None) -> torch.Tensor:
        """Store the latents of `new` tokens and attend: (b, s, outputs of `module`).

        When anything fails, the layers that already ran in this forward are put back before the error goes on.
        """
        self.check_ready()
        past = self.store.length
        try:
            self.stay_on(new.hidden.device)
            with beside_torch(self.device):
                return self._store_latents_and_attend(module, new, mask, past)
        except BaseException as error:
            self.owner.roll_back(past, error)
            raise

    def _store_latents_and_attend(
        self, module: PaluAttention, new: NewTokens, mask: torch.Tensor | None, past: int
    ) -> torch.Tensor:
        store, owner = self.store, self.owner
        b, s = new.hidden.shape[:2]
        if past == owner.padding.length:
            owner.begin_forward(module)
        step = owner.padding.read(mask, batch=b, new=s, past=past)
        held = store.lengths if past else np.zeros(b, dtype=np.int64)
        places = _places(held, step.valid, s)
        if new.rope is not None:
            owner.rope_on(self.device).append(new.rope, new.position_ids, held, places)
        store.append(
            *(
                [array_from_tensor("latents", x[:, None]) for x in side]
                for side in (new.key_latents, new.value_latents)
            ),
            valid=step.valid,
        )
        self.is_initialized = True
        first = module.first_tokens_of(new, places)
        if first is not None:
            kept = (array_from_tensor(name, getattr(first, name)) for name in ("rows", "places", "keys", "values"))
            store.keep_first(*kept)
        out = (
            self._attend_first_forward(module, new, first, step, mask) if not past else self._attend(module, new, step)
        )
        if s > SPARE_TOKENS:
            store.flush(spare=SPARE_TOKENS)
        return out

    def _attend_first_forward(
        self, module: PaluAttention, new: NewTokens, first: Any, step: Step, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Nothing is encoded yet: torch attends over keys and values rebuilt from the latents given."""
        b, s = new.hidden.shape[:2]
        outputs = []
        for q, k, v in module.rebuild(new, first):
            if step.valid is not None and step.mask is None:
                out = attend_rows_alone(module, q, k, v, torch.from_numpy(step.valid), scaling=module.scaling)
            else:
                out = dense_attention(module, q, k, v, mask, scaling=module.scaling)[0]
            outputs.append(out.reshape(b, s, -1))
        return torch.cat(outputs, -1)

    def _attend(self, module: PaluAttention, new: NewTokens, step: Step) -> torch.Tensor:
        """Attention over the stored latents."""
        b, s = new.hidden.shape[:2]
        if not module.has_rope and not module.first_tokens:
            outputs = [self._attend_as_one_head(module, new, step, i) for i in range(module.plan.slices)]
        else:
            outputs = self._attend_rebuilding(module, new, step)
        return torch.cat([x.transpose(1, 2).reshape(b, s, -1) for x in outputs], -1)

    def _attend_as_one_head(self, module: PaluAttention, new: NewTokens, step: Step, number: int) -> torch.Tensor:
        """Without RoPE: queries of latents against latents, a slice's cache by itself; (b, heads, s, width)."""
        q = array_from_tensor("query", module.latent_queries(new, number))
        latents = self.store.slices[number].attend(q, mask=step.mask, scale=module.scaling)
        return module.values_of_latents(tensor_from_array(latents), number)

    def _attend_rebuilding(self, module: PaluAttention, new: NewTokens, step: Step) -> list[torch.Tensor]:
        """Keys rebuilt a tile at a time: (b, heads, s, width) of all slices, or of each where values stay latents."""
        if self._matrices is None:
            self._matrices = module.reconstructions(), module.key_norm()
        store, (all_matrices, key_norm) = self.store, self._matrices
        rope, positions = self.owner.rope_on(self.device).arrays() if module.has_rope else (None, None)
        options = {
            "rope": rope,
            "positions": positions,
            "check_positions": False,
            "key_norm": key_norm,
            "first": store.first(),
            "mask": step.mask,
            "scale": module.scaling,
            "engine": self.owner.options["engine"],
        }
        q = array_from_tensor("query", new.queries[0])
        store.note_queries(
            module.slice_query_heads * q.shape[2],
            *(q, all_matrices[0]),
            rope=rope,
            key_norm=key_norm,
            first=options["first"],
        )
        if not module.plan.fold_values:
            return [tensor_from_array(attend(q, store.slices, all_matrices, **options))]
        heads = module.slice_query_heads
        outputs = []
        for i, (cache, matrices) in enumerate(zip(store.slices, all_matrices, strict=True)):
            own = slice(i * heads, (i + 1) * heads)
            if step.mask is not None and step.mask.shape[1] > 1:
                options["mask"] = step.mask[:, own]
            outputs.append(tensor_from_array(attend(q[:, own], [cache], [matrices], **options)))
        return outputs

    def stay_on(self, device: torch.device) -> None:
        """Also forget matrices that lie on another device."""
        if device != self.device:
            self._matrices = None
        super().stay_on(device)


class PaluCache(CompressedCache):
    """Cache of latents for a model that :func:`kvsketch.adapters.palu.convert` made, or that was loaded.

    The first forward attends over latents as they are; later ones over pages of codes and the newest tokens, which
    are encoded 32 at a time. Layers that were not converted keep transformers' own.
    """

    def __init__(self, layers: list[Any], *, method: Method, options: dict[str, Any], config: Any) -> None:
        super().__init__(layers, method=method, options=options, config=config)
        #: Of each device that layers lie on.
        self.ropes: dict[torch.device, RopeTable] = {}

    @classmethod
    def for_model(  # type: ignore[override]
        cls,
        model: Any,
        *,
        latent_bits: int | None = _UNSET,
        latent_group: int | None = _UNSET,
        max_tokens: int | None = None,
        checked: bool | None = None,
        engine: str | None = None,
    ) -> PaluCache:
        """An empty cache for a converted `model`.

        Parameters
        ----------
        latent_bits, latent_group
            Bits of a latent (None: kept exact), and latents that share a scale and zero (None: all of a slice); by
            default what the model was converted with.
        max_tokens, checked, engine
            See :meth:`CompressedCache.for_model`.
        """
        conversion = getattr(model, "palu", None)
        if conversion is None:
            raise ValueError(f"{type(model).__name__} is not converted by Palu; convert it, or load a converted one")
        settings = conversion.settings
        bits = settings.latent_bits if latent_bits is _UNSET else latent_bits
        if latent_group is _UNSET:
            latent_group = settings.latent_group if bits is not None else None
        codec = latent_codec(bits, latent_group)
        options = {"max_tokens": max_tokens, "checked": checked, "engine": engine}
        config = decoder_config(model)
        name = f"palu-{settings.keep:g}" + ("" if bits is None else f"-{bits}bit")
        cache = cls([], method=Method(name, LayerSettings(codec, codec, 0, 0)), options=options, config=config)
        modules = {module.layer_idx: module for module in conversion.attention_modules(model)}
        for index, (kind, arguments) in enumerate(zip(*get_layer_types_and_kwargs(config), strict=True)):
            module = modules.get(index)
            if module is None:
                cache.layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments))
                continue
            store = LatentStore(
                *(module.plan.slices, codec),
                heads=module.h,
                d=module.d,
                first_tokens=module.first_tokens,
                rebuilds=module.has_rope or module.first_tokens > 0,
                name=f"layer {index}",
                options=options,
            )
            cache.layers.append(PaluLayer(store, cache))
        return cache

    @classmethod
    def from_dense(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a dense cache holds keys and values, and latents cannot be had from them."""
        raise ValueError("a PaluCache cannot be made from a dense cache; run the prompt through the model with it")

    def latent_layer(self, index: int) -> PaluLayer:
        """The layer `index` of the model; ValueError unless it holds latents."""
        layer = self.layers[index] if index < len(self.layers) else None
        if not isinstance(layer, PaluLayer):
            raise ValueError(f"layer {index} of this PaluCache holds no latents; make it with for_model of this model")
        return layer

    def rope_on(self, device: torch.device) -> RopeTable:
        """Positions, cosines and sines of the layers that lie on `device`."""
        return self.ropes.setdefault(device, RopeTable())

    @property
    def nbytes(self) -> int:
        """Live bytes of all layers, and of the positions that they share."""
        return super().nbytes + sum(rope.nbytes for rope in self.ropes.values())

    def report(self) -> dict[str, Any]:
        """As of :class:`CompressedCache`; the total counts positions, and ``table_nbytes`` cosines and sines.

        Bits are a number of the keys and values that the latents stand for; those of the total are all-in.
        """
        report = super().report()
        total = report["total"]
        for rope in self.ropes.values():
            for name in ("nbytes", "allocated_nbytes", "table_nbytes"):
                total[name] += getattr(rope, name)
        numbers = total["dense_nbytes_16"] // 2
        total["bits"] = 8 * total["nbytes"] / numbers if numbers else 0.0
        return report

    def roll_back(self, length: int, error: BaseException | None) -> None:
        super().roll_back(length, error)
        self._crop_ropes()

    def reset(self) -> None:
        """Forget all tokens, keep the settings; another batch size may follow."""
        super().reset()
        self.ropes = {}

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` positions: always up to 64 of the last forward's."""
        super().crop(tokens_to_remove)
        self._crop_ropes()

    def _crop_ropes(self) -> None:
        for rope in self.ropes.values():
            rope.crop(self.compressed[0].store.lengths)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row r becomes the former row ``beam_idx[r]``."""
        beam_idx = beam_idx.cpu()
        super().reorder_cache(beam_idx)
        self._select_positions(beam_idx.numpy())

    def _select_positions(self, rows: Any) -> None:
        for rope in self.ropes.values():
            rope.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, its copies next to each other."""
        batch = self.compressed[0].store.batch if self.get_seq_length() else 0
        super().batch_repeat_interleave(repeats)
        self._select_positions(np.repeat(np.arange(batch), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`: positions, or a boolean for each row."""
        indices = indices.cpu()
        batch = self.compressed[0].store.batch
        super().batch_select_indices(indices)
        self._select_positions(np.arange(batch)[indices.numpy()])

    def save(self, path: Any) -> None:
        """Refuse: files of latents are not written yet by this version."""
        raise ValueError("a PaluCache cannot be saved; save the text, or generate with a CompressedCache")

    @classmethod
    def load(cls, model: Any, path: Any) -> Any:
        """Refuse, as :meth:`save` does."""
        raise ValueError("a PaluCache cannot be loaded; none is ever saved")


def _places(held: Any, valid: Any, s: int) -> torch.Tensor:
    """(b, s): the place in its row of each of s new positions of rows that hold `held` (b,) tokens; padding: -1."""
    valid = np.ones((len(held), s), dtype=bool) if valid is None else valid
    return torch.from_numpy(np.where(valid, held[:, None] + valid.cumsum(1) - 1, -1))
