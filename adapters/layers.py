"""One layer of a :class:`~kvsketch.adapters.transformers_cache.CompressedCache`, as transformers sees it."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvsketch._prepared_step import has_device_steps
from kvsketch.adapters.attention_function import (
    LAYER_ATTRIBUTE,
    LAYER_KEYWORD,
    NAME,
    attend_rows_alone,
    check_supported,
    dense_attention,
)
from kvsketch.adapters.decode_step import take_usual_step
from kvsketch.adapters.torch_dlpack import array_from_tensor, beside_torch, tensor_from_array
from kvsketch.cache import Cache

if TYPE_CHECKING:
    from kvsketch.adapters.transformers_cache import CompressedCache

#: After an append of more tokens than this, all but so many of what is due is encoded at once, to free memory; crop
#: by up to this many tokens stays exact.
SPARE_TOKENS = 64


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, in a :class:`kvsketch.cache.Cache`.

    `update` only holds the new tokens: what is padding shows in the mask, which reaches the attention function alone.
    There, :meth:`attend` stores them and attends.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, store: Cache, owner: CompressedCache) -> None:
        super().__init__()
        self.store = store
        self.owner = owner
        #: Where the tokens held came from, and lie.
        self.device = torch.device("cpu")
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedLayer:
        self.check_ready()
        with beside_torch(self.device):
            twin = type(self)(self.store.copy(), copy.deepcopy(self.owner, memo))
        twin.is_initialized, twin.device = self.is_initialized, self.device
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        return f"CompressedLayer({self.store!r})"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: shapes and dtypes are taken from the first tokens stored."""

    def check_ready(self) -> None:
        """Raise RuntimeError when new tokens were given but never stored, or a forward left the cache unusable."""
        if self.owner.broken:
            raise RuntimeError(self.owner.broken)
        if self._pending is not None:
            raise RuntimeError(
                f"keys and values given to {self.store.name} never reached kvsketch's attention function, so the model "
                f"attended without its past: call model.set_attn_implementation({NAME!r}) (CompressedCache.for_model "
                "does), then cache.reset() and start again"
            )

    def stay_on(self, device: torch.device) -> None:
        """Raise ValueError when tokens come from another device than those held."""
        if self.store.length and device != self.device:
            raise ValueError(
                f"{self.store.name} holds tokens on {self.device}, but new ones are on {device}; move the model back, "
                "or save the cache and load it with the model where it is now"
            )
        self.device = device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold new keys (b, h, s, d) and values (b, h, s, dv) for the attention function, and return them."""
        self.check_ready()
        forwarded = kwargs.get("kwargs")
        if forwarded is not None:
            forwarded[LAYER_KEYWORD] = self
        else:
            key_states = key_states.view_as(key_states)
            setattr(key_states, LAYER_ATTRIBUTE, self)
        self._pending = (key_states, value_states)
        return key_states, value_states

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store the tokens of the last update and attend: query (b, hq, s, d) to (b, s, hq, dv).

        When anything fails, the layers that already ran in this forward are put back before the error goes on.
        """
        past = self.store.length
        pending, self._pending = self._pending, None
        try:
            if pending is None or key is not pending[0] or value is not pending[1]:
                raise ValueError(
                    f"{type(module).__name__} changes keys or values between the cache and attention (a latent cache, "
                    "as in MLA models, or an update used twice); a compressed cache cannot hold them: use DynamicCache"
                )
            check_supported(module, **kwargs)
            self.stay_on(query.device)
            with beside_torch(self.device):
                return self._store_and_attend(module, query, key, value, attention_mask, past, **kwargs)
        except BaseException as error:
            self.owner.roll_back(past, error)
            raise

    def _store_and_attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        past: int,
        *,
        scaling: float | None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **ignored: Any,
    ) -> torch.Tensor:
        store, padding = self.store, self.owner.padding
        b, _, s, _ = query.shape
        if past == padding.length:
            self.owner.begin_forward(module)
        step = padding.read(mask, batch=b, new=s, past=past)
        if s == 1 and step.valid is None and step.mask is None and s_aux is None:
            taken = take_usual_step(store, query, key, value, scaling, softcap)
            if taken is not None:
                return taken
        k, v = array_from_tensor("key", key), array_from_tensor("value", value)
        alone = s == 1 and step.valid is None and step.mask is None
        on_device = bool(past) and alone and has_device_steps(store, query.shape[1])
        if on_device and all(x.is_contiguous() for x in (query, key, value)):
            store.prepare_step()
            attend = partial(store.step, k=k, v=v)
        else:
            store.append(k, v, valid=step.valid)
            attend = partial(store.attend, mask=step.mask)
        self.is_initialized = True
        if past:
            logits = None if s_aux is None else array_from_tensor("s_aux", s_aux.float().contiguous())
            q = array_from_tensor("query", query)
            out = tensor_from_array(attend(q, scale=scaling, softcap=softcap, sink_logits=logits))
            out = out.transpose(1, 2).contiguous()
        else:
            # The first forward is exact: nothing is encoded yet, and torch attends over the tensors given.
            options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            if step.valid is not None and step.mask is None:
                out = attend_rows_alone(module, query, key, value, torch.from_numpy(step.valid), **options)
            else:
                out = dense_attention(module, query, key, value, mask, **options)[0]
        if s > SPARE_TOKENS:
            store.flush(spare=SPARE_TOKENS)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Positions that a mask for `query_length` new ones spans, and the first of them."""
        return self.store.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions seen, padding included."""
        return self.store.length

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def offload(self) -> None:
        """Nothing to move: the cache is small enough to stay where its layer is."""

    def prefetch(self) -> None:
        """Nothing to move: the cache is small enough to stay where its layer is."""

    def reset(self) -> None:
        """Forget everything, keep the settings; another batch size may follow."""
        self.store.reset()
        self._pending = None
        self.is_initialized = False

    def roll_back(self, length: int) -> None:
        """Drop what a failed forward gave, stored or not, behind the first `length` positions."""
        self._pending = None
        if self.store.length > length:
            with beside_torch(self.device):
                self.store.crop(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row r becomes the former row ``beam_idx[r]``."""
        self.check_ready()
        if self.store.length:
            with beside_torch(self.device):
                self.store.reorder(array_from_tensor("beam_idx", beam_idx.cpu()))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` positions; ValueError, before any change, when they are encoded."""
        self.check_ready()
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the tokens to drop, got {tokens_to_remove}; give a negative number")
        if tokens_to_remove and self.store.length:
            with beside_torch(self.device):
                self.store.crop(max(0, self.store.length + tokens_to_remove))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.check_ready()
        if self.store.length:
            with beside_torch(self.device):
                self.store.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (positions, or a boolean for each row)."""
        self.check_ready()
        if self.store.length:
            with beside_torch(self.device):
                self.store.select(array_from_tensor("indices", torch.arange(self.store.batch)[indices.cpu()]))
