"""The seam with transformers: a `Cache` whose attention layers are ours, and the attention function that reads it.

The one file that knows the library's internals. `generate` itself stays stock. A model is prepared for the length of a
run by `attached`, which takes back everything it changed.

How a policy gets its turn: the attention function runs right after a layer's `update`, so it is where the statistics
are gathered, where a finished prompt is compressed, and where entries leave while generating. Phases are announced
(`KVCache.announce`), never guessed: a later turn and a chunk of a prompt also come with several queries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcli.engine.attention import attend
from kvcli.engine.cache import LayerCache
from kvcli.engine.coordinates import Coordinates, locating
from kvcli.engine.hidden import Survivors, hiding, survivors
from kvcli.engine.masks import physical_mask
from kvcli.engine.pictures import PictureTurn, Unplaced, picture_prompt
from kvcli.engine.rotary import Rotator
from kvcli.engine.run import SLACK, Turn
from kvcli.errors import StartError
from kvcli.policies.base import Policy
from kvcli.policies.contract import Prompt

NAME = "kvcli"


@dataclass
class Handle:
    """What the attention function must know about the keys it is given. It travels as an attribute of the key tensor,
    since a model that shares keys between layers hands the same tensor to layers that never called `update`."""

    layer: KVLayer
    positions: Tensor | None
    bias: Tensor | None
    holes: bool
    seen: int
    columns: Tensor | None = None
    lag: Tensor | None = None
    fresh: bool = True


class KVLayer(CacheLayerMixin):
    """One attention layer of a `KVCache`: stock on the outside, a `LayerCache` inside. Lengths are logical."""

    is_compileable = False

    def __init__(self, owner: KVCache, index: int, kind: str, window: int | None, shared: bool) -> None:
        super().__init__()
        self.keys: Tensor | None
        self.values: Tensor | None
        self._owner = weakref.ref(owner)
        self.index, self.kind, self.window = index, kind, window
        self.is_sliding = window is not None
        self.store = LayerCache(shared)
        self.turn: Turn | None = None
        self.bytes_noted = 0

    @property
    def owner(self) -> KVCache:
        owner = self._owner()
        assert owner is not None, "a layer outlived its cache"
        return owner

    @property
    def is_croppable(self) -> bool:
        return not self.owner.policy.acts_in_decode

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        survivors, lag = self.owner.survivors, self.owner.lag(self)
        if lag is not None:
            key_states = self.owner.turned(key_states, lag, self.index)
        room = self.owner.room(self, key_states.shape[2])
        if survivors is None:
            self.store.append(key_states, value_states, room)
        else:
            self.store.append_survivors(key_states, value_states, survivors, room)
        self.owner.account(self)
        return self.shown(None if survivors is None else survivors.columns, lag)

    def shown(self, columns: Tensor | None = None, lag: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values as the model is given them, with what the attention function must know."""
        self.keys, self.values = self.store.view()
        positions = None if self.store.positions is None else self.store.located()
        self.keys._kvcli = Handle(  # type: ignore[attr-defined]
            self, positions, self.store.side_view("bias"), self.store.holes, self.store.seen, columns, lag
        )
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.store.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store.reset()
        self.keys, self.values, self.turn = None, None, None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if self.turn is not None and self.turn.slid and abs(tokens_to_remove) > SLACK:
            raise ValueError(f"a sliding window can give back {SLACK} tokens at most, not {abs(tokens_to_remove)}")
        if tokens_to_remove:
            self.store.crop(abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)), beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = len(self.store.free)
        self._map(lambda t: t.repeat_interleave(repeats, 0), [i for i in range(rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)], indices.tolist())

    def _map(self, rows: Callable[[Tensor], Tensor], order: Sequence[int]) -> None:
        self.store.map(rows, order)
        if self.store.keys is not None:
            self.keys, self.values = self.store.view()


class PictureLayer(KVLayer):
    """A layer whose keys are the picture's: written once, read by every later token straight from `keys`."""

    holds_picture = True
    is_croppable = True

    def __init__(self, owner: KVCache, index: int) -> None:
        super().__init__(owner, index, "cross_attention", None, shared=False)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        self.owner.account(self)
        return self.shown()

    def read_again(self) -> None:
        """Show what is held now to the tokens that come; none of them is a prompt's."""
        keys, _ = self.shown()
        keys._kvcli.fresh = False  # type: ignore[attr-defined]

    def _map(self, rows: Callable[[Tensor], Tensor], order: Sequence[int]) -> None:
        super()._map(rows, order)
        if self.store.keys is not None:
            self.read_again()


class KVCache(Cache):
    """A cache for one conversation of a batch under one policy.

    whole: whether sliding layers hold also what no later token can see, for a cache that others start from.

    Attention layers of the stock layout are ours; linear, convolution and shared ones stay stock.
    """

    def __init__(self, config: Any, policy: Policy, rotator: Rotator | None = None) -> None:
        self.policy = policy
        self.rotator = rotator
        self.prompt: Prompt | None = None
        self.survivors: Survivors | None = None
        self.coordinates = Coordinates()
        self.picture: Prompt | None = None
        self.shared: dict[str, Tensor] = {}
        self.shared_pictures: dict[str, Tensor] = {}
        self.whole = False
        self.bytes_peak = 0
        self._bytes_now = 0
        stocks, layers = layout(config), []
        shared = any(kind == "dummy" for kind, _ in stocks)
        for index, (kind, stock) in enumerate(stocks):
            window = getattr(stock, "sliding_window", None)
            if not compressible(stock):
                layers.append(stock)
            elif kind == "cross_attention":
                layers.append(PictureLayer(self, index))
            else:
                layers.append(KVLayer(self, index, kind, window, shared))
        super().__init__(layers=layers)
        if not self.ours:
            raise StartError("this model has no attention layer whose cache can be compressed")

    @property
    def ours(self) -> list[KVLayer]:
        """The layers that a policy acts on."""
        return [layer for layer in self.layers if isinstance(layer, KVLayer) and not isinstance(layer, PictureLayer)]

    @property
    def pictures(self) -> list[PictureLayer]:
        """The layers that hold pictures beside the text; a policy acts on them apart from the others."""
        return [layer for layer in self.layers if isinstance(layer, PictureLayer)]

    def announce(self, prompt: Prompt) -> None:
        """Say what the next prompt is: everything up to and including it, all turns. Compression happens as soon as a
        layer has seen that many columns."""
        self.prompt, self.shared, self.shared_pictures, self.picture = prompt, {}, {}, None
        for layer in [*self.ours, *self.pictures]:
            layer.turn = None

    def room(self, layer: KVLayer, incoming: int) -> int:
        """Slots to reserve beyond the incoming ones: none for a first prompt that will be compressed anyway."""
        prompt = self.prompt
        if prompt is None:
            return 0
        if layer.store.seen + incoming < prompt.columns:
            return prompt.columns - layer.store.seen - incoming
        if layer.store.seen == 0 and self.policy.frees_memory:
            return 0
        return self.policy.growth(prompt)

    def turn(self, layer: KVLayer) -> Turn | None:
        """The work of this layer on the announced prompt, made for the batch that arrived (beams repeat rows)."""
        if self.prompt is None:
            return None
        if layer.turn is None:
            rows = len(layer.store.free)
            if rows != len(self.prompt.lengths):
                repeats = rows // len(self.prompt.lengths)
                self.prompt = self.prompt.map(torch.arange(len(self.prompt.lengths)).repeat_interleave(repeats))
            # A chunk that an entry falls out of is not a window that slides: there the model's mask alone decides. And
            # what slid out of the first layer's window must not leave the hidden states of layers that still see it.
            slides = layer.kind == "sliding_attention" and not self.policy.hides_tokens and not self.whole
            window = layer.window if slides else None
            layer.turn = Turn(
                layer.index,
                len(self.ours),
                window,
                layer.store,
                self.policy,
                self.prompt,
                self.rotator,
                self.coordinates,
                first=layer is self.ours[0],
                shared=self.shared,
            )
        return layer.turn

    def picture_turn(self, layer: PictureLayer, mask: Tensor | None) -> Turn | None:
        """The work of a layer that holds pictures on the announced prompt. mask: the model's, over the picture."""
        if self.prompt is None or mask is None:
            return None
        if self.picture is None:
            self.picture = picture_prompt(mask, self.prompt)
        if layer.turn is None:
            layer.turn = PictureTurn(
                layer.index,
                len(self.pictures),
                None,
                layer.store,
                self.policy,
                self.picture,
                None if self.rotator is None else Unplaced(),
                first=layer is self.pictures[0],
                shared=self.shared_pictures,
                text=self.ours[0].store,
                asking=self.prompt,
            )
        return layer.turn

    def lag(self, layer: KVLayer) -> Tensor | None:
        """How far [B, 1, 1] below their true positions the next tokens stand, under a policy that renumbers: minus the
        entries that have left. None for not at all."""
        if not self.policy.renumbers or self.prompt is None or layer.store.keys is None:
            return None
        padding = [self.prompt.columns - n for n in self.prompt.lengths]
        gone = [min(0, n + pad - layer.store.seen) for n, pad in zip(layer.store.held, padding, strict=True)]
        return torch.tensor(gone, device=layer.store.keys.device)[:, None, None] if any(gone) else None

    def turned(self, states: Tensor, steps: Tensor, layer: int) -> Tensor:
        """Queries or keys of a layer, moved by a number of positions."""
        assert self.rotator is not None, "a policy that renumbers says so in needs_rotation"
        return self.rotator.turn(states, steps, layer)

    # --- accounts, on the host

    def account(self, layer: KVLayer) -> None:
        """Note what a layer uses after it grew or shrank, and the highest total."""
        used = layer.store.bytes_used()
        self._bytes_now += used - layer.bytes_noted
        layer.bytes_noted = used
        self.bytes_peak = max(self.bytes_peak, self._bytes_now)

    def held(self) -> tuple[float, ...]:
        """Entries of each row, mean of our layers."""
        stores = [layer.store.held for layer in self.ours]
        return tuple(sum(rows) / len(stores) for rows in zip(*stores, strict=True))

    def full_bytes(self, seen: int) -> int:
        """What our layers would hold of one row of `seen` tokens, had nothing been compressed: a sliding layer never
        holds more than its window, and pictures beside the text come on top."""
        total = 0
        for layer in self.ours:
            slots = seen if layer.window is None else min(seen, layer.window)
            total += layer.store.bytes_per_slot() // max(1, len(layer.store.free)) * slots
        for layer in self.pictures:
            total += layer.store.bytes_per_slot() // max(1, len(layer.store.free)) * layer.store.seen
        return total

    def bytes_used(self) -> int:
        """Keys and values of our layers in used slots, and of the stock attention layers beside them."""
        stock = [layer for layer in self.layers if not isinstance(layer, KVLayer)]
        return sum(store.bytes_used() for store in self._stores) + sum(_stock_bytes(layer) for layer in stock)

    def bytes_reserved(self) -> int:
        return sum(store.bytes_reserved() for store in self._stores)

    def bytes_side(self) -> int:
        return sum(store.bytes_side() for store in self._stores)

    @property
    def _stores(self) -> list[LayerCache]:
        return [layer.store for layer in [*self.ours, *self.pictures]]

    # --- what the library asks of a cache as a whole

    def crop(self, tokens_to_remove: int) -> None:
        """Cross-attention layers hold the picture, not the text: they are left as they are."""
        for layer in self.layers:
            if not getattr(layer, "holds_picture", False):
                layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows_became(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.prompt is not None:
            self._rows_became(torch.arange(len(self.prompt.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows_became(indices)

    def _rows_became(self, order: Tensor) -> None:
        """What is known of the prompt follows its rows."""
        if self.prompt is None:
            return
        self.prompt = self.prompt.map(order)
        self.coordinates.map(order)
        for layer in self.ours:
            if layer.turn is not None:
                layer.turn.prompt = self.prompt
        if self.picture is not None:
            self.picture = self.picture.map(order)


def layout(config: Any) -> list[tuple[str, Any]]:
    """(kind, stock cache layer) for each decoder layer of a model's config."""
    text = config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(text)
    stock = DynamicCache(config=config).layers
    cross = set(getattr(text, "cross_attention_layers", None) or ())
    named = ["cross_attention" if i in cross else kind for i, kind in enumerate(kinds)]
    for kind, layer in zip(named, stock, strict=True):
        layer.holds_picture = kind == "cross_attention"
    return list(zip(named, stock, strict=True))


def compressible(stock: Any) -> bool:
    """Whether our layer can take the place of a stock one."""
    return type(stock) in (DynamicLayer, DynamicSlidingWindowLayer)


def layer_report(config: Any) -> list[tuple[int, str, bool, str]]:
    """(index, kind, compressible, why not) for each decoder layer."""
    report = []
    for index, (kind, stock) in enumerate(layout(config)):
        if compressible(stock):
            why = ""
        elif kind == "dummy":
            why = "reads the keys of an earlier layer, and shrinks with them"
        elif isinstance(stock, LinearAttentionCacheLayerMixin):
            why = "keeps a state of fixed size, not a cache that grows"
        else:
            why = f"its cache is a {type(stock).__name__}"
        report.append((index, kind, not why, why))
    return report


def entry_bytes(config: Any, dtype: torch.dtype) -> list[int]:
    """KV bytes of one token in each of our layers; what holds pictures beside the text does not grow with it."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    growing = [kind for kind, stock in layout(config) if compressible(stock) and kind != "cross_attention"]
    return [2 * heads * width * dtype.itemsize for _ in growing]


def _stock_bytes(layer: Any) -> int:
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


# --- attention


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a run: ours where the keys come from a `KVLayer`, stock everywhere else."""
    handle: Handle | None = getattr(key, "_kvcli", None)
    if handle is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return output, None
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise StartError(f"{type(module).__name__} uses learned attention sinks or biases, which kvcli does not serve")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if handle.lag is not None:
        query = handle.layer.owner.turned(query, handle.lag, handle.layer.index)
    owner, handle.fresh = handle.fresh, False
    cache, turn = handle.layer.owner, None
    if isinstance(handle.layer, PictureLayer):
        turn = cache.picture_turn(handle.layer, attention_mask) if owner else None
        if attention_mask is None and handle.positions is not None:
            attention_mask = query.new_ones(1, 1, query.shape[2], handle.seen, dtype=torch.bool)  # all of the picture
        elif attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    elif owner:
        turn = cache.turn(handle.layer)
    if turn is not None:
        turn.columns = handle.columns
    softcap = kwargs.get("softcap")
    plain = handle.positions is None and handle.bias is None and softcap is None and query.shape[2] > 1
    if plain and (turn is None or not turn.wants_all_rows):
        # A first prompt without statistics over all rows: exactly the library's own arithmetic.
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        if turn is not None:
            turn.observe(query, key, attention_mask, scale)
    else:
        mask = physical_mask(
            attention_mask, handle.positions, handle.holes, query.shape[2], handle.seen, handle.columns
        )
        run = attend if turn is None else turn.attend
        output = run(query, key, value, mask, scale, softcap=softcap, bias=handle.bias)
        output = output.transpose(1, 2).contiguous()
    if owner and turn is not None:
        after_attention(handle.layer, turn, query.shape[2], handle.columns)
    return output, None


def after_attention(layer: KVLayer, turn: Turn, queries: int, columns: Tensor | None) -> None:
    """Let the policy act on a layer whose attention is done."""
    cache = layer.owner
    if columns is not None and layer is cache.ours[-1]:
        cache.survivors = None
    if turn.prompt_ends_now:
        _compress(layer, turn)
        if cache.policy.hides_tokens and layer is cache.ours[0]:
            cache.survivors = survivors(layer.store.located(), layer.store.seen - queries, queries)
    elif turn.step > 0:
        turn.slide()
        if queries == 1 and cache.policy.acts_in_decode:
            turn.evict()


def _compress(layer: KVLayer, turn: Turn) -> None:
    """What the policy says at the end of a prompt: layer by layer, or after the last one for all that are alike."""
    cache, done = layer.owner, [layer]
    if not cache.policy.served_at_once:
        turn.apply(cache.policy.compress(turn.view()))
    else:
        alike: Sequence[KVLayer] = cache.pictures if isinstance(layer, PictureLayer) else cache.ours
        if layer is not alike[-1]:
            return
        done = [each for each in alike if each.turn is not None]
        turns = [each.turn for each in done if each.turn is not None]
        for each, answer in zip(turns, cache.policy.compress_model([t.view() for t in turns]), strict=True):
            each.apply(answer)
    for changed in done:
        cache.account(changed)
        if isinstance(changed, PictureLayer):
            changed.read_again()


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def attached(model: Any, cache: KVCache | None = None) -> Iterator[None]:
    """Route the text model's attention through kvcli inside the block; leave the model as it was found."""
    nested = "text_config" in model.config.sub_configs
    text = model.config.text_config if nested else model.config
    before = text._attn_implementation
    deltas = {m: m.rope_deltas for m in model.modules() if "rope_deltas" in vars(m)}
    model.set_attn_implementation({"text_config" if nested else "": NAME})
    try:
        with hiding(model, cache), locating(model, cache):
            yield
    finally:
        model.set_attn_implementation({"text_config" if nested else "": before})
        for module, value in deltas.items():
            module.rope_deltas = value
