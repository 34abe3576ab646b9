"""In which order the visual tokens of each model family come, as boxes.

Each function gives boxes `[tokens, 4]` (x0, y0, x1, y1) of one picture as shares of its width and height.
They lie outside 0 to 1 where a token sees padding, and are NaN for tokens that see nothing. Knows families;
what their image processors do to a picture is in the `Survey` that they are given.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from kvcli.engine.geometry import Survey, place

_TILED = ("aya_vision", "gemma3", "got_ocr2", "idefics3", "internvl", "llava", "paligemma", "smolvlm")
"""Families that send several tiles to the tower in the order of their tokens; others are trusted with one."""


def square_tiles(model: Any, surveys: Sequence[Survey], visual_tokens: int) -> list[list[Tensor]]:
    """Square tiles one after the other, each row by row (LLaVA, PaliGemma, Gemma 3, Idefics 3, InternVL).

    Gives the boxes of all pictures, or an empty list if `visual_tokens` of this model can't be such tiles.
    """
    pictures = [_tiles(seen) for seen in surveys]
    total = sum(map(len, pictures))
    if not total or (total > len(pictures) and model.config.model_type not in _TILED):
        return []
    tokens, rest = divmod(visual_tokens, total)
    side = math.isqrt(tokens)
    class_tokens = tokens - side**2
    if rest or not side or class_tokens > 1:
        return []
    first = _nothing(class_tokens)
    return [[torch.cat([part for tile in tiles for part in (first, _square(model, tile, side))]) for tiles in pictures]]


def merged_patches(image_processor: Any, seen: Survey) -> Tensor:
    """Patches in squares of merge x merge, each square one token, row by row (Qwen-VL and GLM-V)."""
    frames, rows, columns = (int(count) for count in seen.features["image_grid_thw"][0])
    merge, edge = image_processor.merge_size, image_processor.patch_size
    grid = (rows // merge, columns // merge)
    patches = seen.places[: rows * columns].reshape(*grid, merge, merge, 3, -1, edge, edge)[..., 0, :, :]
    canvas = patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * edge, columns * edge)
    return place(canvas).raster(*grid, (merge * edge, merge * edge)).repeat(frames, 1)


def pooled_patches(image_processor: Any, seen: Survey) -> Tensor:
    """Patches that carry their own column and row, pooled in squares, row by row (Gemma 4)."""
    positions = seen.features["image_position_ids"][0]
    real = positions[:, 0] >= 0
    columns, rows = (int(last) + 1 for last in positions.amax(0))
    edge, pool = image_processor.patch_size, image_processor.pooling_kernel_size
    canvas = torch.empty(rows, columns, edge, edge, 3, dtype=seen.places.dtype)
    canvas[positions[real, 1], positions[real, 0]] = seen.places[0, real].reshape(-1, edge, edge, 3)
    canvas = canvas.permute(4, 0, 2, 1, 3).reshape(3, rows * edge, columns * edge)
    return place(canvas).raster(rows // pool, columns // pool, (pool * edge, pool * edge))


def any_size(model: Any, seen: Survey) -> Tensor:
    """A picture of any size, one token for a square of patches, row by row (Pixtral, Mistral 3)."""
    height, width = (int(edge) for edge in seen.features["image_sizes"][0])
    cell = _patch(model) * getattr(model.config, "spatial_merge_size", 1)
    canvas = _tiles(seen)[0, :, :height, :width]
    return place(canvas).raster(height // cell, width // cell, (cell, cell))


def packed(model: Any, seen: Survey, tiled: bool) -> Tensor:
    """The whole picture, then a canvas of tiles with separators (LLaVA-NeXT, LLaVA-OneVision).

    The model's own packing is run, on boxes instead of features, so that its cuts and its order are right.
    Without `tiled` only the whole picture, which is how OneVision sees several pictures in a prompt.
    """
    tiles, patch = _tiles(seen), _patch(model)
    edge = tiles.shape[-1]
    side = edge // patch
    size = torch.as_tensor(seen.features["image_sizes"]).reshape(-1, 2)[:1]
    views = [place(tiles[0]).raster(side, side, (patch, patch))]
    if tiled:
        best = select_best_resolution(size[0].tolist(), model.config.image_grid_pinpoints)
        rows, columns = (length // edge for length in best)
        canvas = place(_joined(tiles[1:], rows, columns))
        corners = [(row * edge, column * edge) for row in range(rows) for column in range(columns)]
        views += [canvas.raster(side, side, (patch, patch), corner) for corner in corners]
    pack = model.model.pack_image_features
    names = {"vision_feature_select_strategy", "vision_aspect_ratio"} & set(inspect.signature(pack).parameters)
    settings = {name: getattr(model.config, name) for name in names}
    tokens: Tensor = pack([torch.stack(views)], size, image_newline=_nothing(1)[0], **settings)[0][0]
    return torch.cat((tokens[: side**2], _filled(tokens[side**2 :]))) if tiled else tokens


def crops_then_whole(model: Any, seen: Survey) -> Tensor:
    """A canvas of crops, a separator, then the whole picture; a separator ends each row (Phi-4-multimodal)."""
    tiles, cell = _tiles(seen), 2 * _patch(model)
    edge = tiles.shape[-1]
    side = math.ceil(edge / cell)
    height, width = (int(length) for length in seen.features["image_sizes"][0])
    rows, columns = height // edge, width // edge
    shown = _joined(seen.features["image_attention_mask"][0, 1:, None, ::2, ::2], rows, columns)[0]
    used = (int(shown[:, 0].sum()), int(shown[0].sum()))
    crops = place(_joined(tiles[1:], rows, columns)).raster(*used, (cell, cell))
    whole = place(tiles[0]).raster(side, side, (cell, cell))
    return torch.cat((_rows_ended(crops, used[0]), _nothing(1), _rows_ended(whole, side)))


def cross_attended(model: Any, seen: Survey) -> Tensor:
    """All tiles that a picture may have, each with a class token before its patches, row by row (Mllama)."""
    patch = _patch(model)
    side = seen.places.shape[-1] // patch
    tiles = [place(tile).raster(side, side, (patch, patch)) for tile in _tiles(seen)]
    return torch.cat([part for tile in tiles for part in (_nothing(1), tile)])


def _tiles(seen: Survey) -> Tensor:
    """The tiles of one picture as `[tiles, 3, h, w]`; none if its pixels are not tiles."""
    return seen.places.flatten(0, -4) if seen.places.dim() >= 4 else seen.places.new_empty(0, 3, 0, 0)


def _square(model: Any, tile: Tensor, side: int) -> Tensor:
    """Boxes of `side` x `side` tokens; a tower leaves out what remains after its last whole patch."""
    height, width = tile.shape[-2:]
    patch = _patch(model)
    covered = (height // patch * patch or height, width // patch * patch or width)
    return place(tile).raster(side, side, (covered[0] / side, covered[1] / side))


def _patch(model: Any) -> int:
    """Edge of a patch in pixels of the tower's input; 1 if its settings don't tell."""
    patch = getattr(getattr(model.config, "vision_config", None), "patch_size", 1)
    return patch if isinstance(patch, int) else patch[0]


def _joined(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The canvas `[C, rows * h, columns * w]` of tiles `[rows * columns or more, C, h, w]`."""
    _, channels, height, width = tiles.shape
    grid = tiles[: rows * columns].reshape(rows, columns, channels, height, width)
    return grid.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)


def _rows_ended(boxes: Tensor, rows: int) -> Tensor:
    """The boxes with a separator after each of `rows` rows."""
    return torch.cat([torch.cat((row, _nothing(1))) for row in boxes.chunk(rows)])


def _filled(boxes: Tensor) -> Tensor:
    """Boxes of rows that end with a separator, made as wide and high as they are apart.

    Large canvases are shrunk after they were cut in tokens: the tokens then lie further apart than before.
    """
    columns = int(boxes[:, 0].isnan().nonzero()[0])
    grid = boxes.reshape(-1, columns + 1, 4)
    low, high = grid[..., :2], grid[..., 2:]
    middle, half = (low + high) / 2, (high - low) / 2
    if columns > 1:
        half[..., 0] = (middle[:, 1, 0] - middle[:, 0, 0])[:, None] / 2
    if len(grid) > 1:
        half[..., 1] = (middle[1, 0, 1] - middle[0, 0, 1]) / 2
    return torch.cat((middle - half, middle + half), -1).reshape(-1, 4)


def _nothing(tokens: int) -> Tensor:
    """Boxes of tokens that see no part of the picture."""
    return torch.full((tokens, 4), torch.nan, dtype=torch.float64)
