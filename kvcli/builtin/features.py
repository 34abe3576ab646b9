"""Feature maps of the tower's trunk for a folder of photographs, computed once and kept on disk.

Knows photographs and the trunk. Knows nothing of captions or training. The maps are numpy files in half precision
that are mapped into memory, so that training reads only what a batch needs.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from transformers import ViTImageProcessorPil

from kvcli.builtin.tower import COARSE, FINE, Trunk

SIDE = 384
SHAPES = {"fine": (FINE, SIDE // 16, SIDE // 16), "coarse": (COARSE, SIDE // 32, SIDE // 32)}
SHARE, TURN, LIGHT = 0.75, 6.0, 0.3  # of a photo seen again: least share of a side, most degrees, change of the light


def image_processor() -> Any:
    """A stock processor: 384 x 384, bicubic, (pixel - 127) / 128."""
    return ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        resample=Image.Resampling.BICUBIC,
        image_mean=[127 / 255] * 3,
        image_std=[128 / 255] * 3,
        do_convert_rgb=True,
    )


def seen_again(photo: Image.Image, draw: random.Random) -> Image.Image:
    """The photo as another camera might have taken it, in RGB: a part of it, a little turned, in another light. Corners
    that the turn leaves empty are grey: the mean that the tower's pixels are measured from."""
    wide, high = (side * draw.uniform(SHARE, 1) for side in photo.size)
    left, top = draw.uniform(0, photo.width - wide), draw.uniform(0, photo.height - high)
    photo = photo.convert("RGB").rotate(draw.uniform(-TURN, TURN), Image.Resampling.BICUBIC, fillcolor=(127, 127, 127))
    photo = photo.crop((round(left), round(top), round(left + wide), round(top + high)))
    for light in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        photo = light(photo).enhance(draw.uniform(1 - LIGHT, 1 + LIGHT))
    return photo


class Features:
    """Maps of `names` in `folder`, computed on the first use. `maps(names)` gives float32 fine and coarse maps.

    view: 0 for the photos as they are, n for each of them `seen_again`, always the same way for the same n.
    """

    def __init__(self, folder: Path, names: Sequence[str], view: int = 0) -> None:
        self.row = {name: i for i, name in enumerate(names)}
        self.folder, self.view = folder, view
        self.files: dict[str, np.memmap[Any, Any]] = {}

    def compute(self, photos: Path, trunk: Trunk, batch: int = 8, tick: Callable[[int], None] | None = None) -> None:
        """Fill the files; goes on where an earlier call stopped. Raises ValueError for another list of names."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names, state = list(self.row), self.folder / "state.json"
        done = 0
        if state.exists():
            stored = json.loads(state.read_text())
            if stored["names"] != names:
                raise ValueError(f"{self.folder} holds the features of other photos; choose another folder")
            done = stored["done"]
        mode: Any = "r+" if done else "w+"
        for key, shape in SHAPES.items():
            path = self.folder / f"{key}.f16"
            self.files[key] = np.memmap(path, np.float16, mode, shape=(len(names), *shape))
        processor = image_processor()
        for start in range(done, len(names), batch):
            chosen = names[start : start + batch]
            pixels = processor([self._seen(photos, name) for name in chosen], return_tensors="pt")["pixel_values"]
            with torch.inference_mode():
                fine, coarse = trunk(pixels)
            self.files["fine"][start : start + len(chosen)] = fine.numpy()
            self.files["coarse"][start : start + len(chosen)] = coarse.numpy()
            if start // batch % 50 == 49 or start + batch >= len(names):
                for file in self.files.values():
                    file.flush()
                spare = state.with_suffix(".new")
                spare.write_text(json.dumps({"names": names, "done": start + len(chosen)}))
                os.replace(spare, state)
                if tick:
                    tick(start + len(chosen))

    def _seen(self, photos: Path, name: str) -> Image.Image:
        photo = Image.open(photos / name)
        return seen_again(photo, random.Random(f"{self.view}:{name}")) if self.view else photo

    def moments(self, names: Sequence[str], key: str) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of `key` over these photos."""
        cells = torch.from_numpy(np.stack([self.files[key][self.row[name]] for name in names])).float()
        deviation, mean = torch.std_mean(cells, (0, 2, 3))
        return mean, deviation.clamp(min=1e-2)

    def maps(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """`[B, 112, 24, 24]` and `[B, 1280, 12, 12]` of these photos."""
        rows = [self.row[name] for name in names]
        fine, coarse = (torch.from_numpy(np.stack([self.files[k][r] for r in rows])).float() for k in SHAPES)
        return fine, coarse
