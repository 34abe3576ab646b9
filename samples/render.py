"""Draws the sample pictures that are no photographs: `python samples/render.py` writes them beside this file.

Each is drawn at twice its size and scaled down, so that edges are smooth. Nothing is random without a seed.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Colour = tuple[int, int, int]
SCALE = 2


def _font(size: int) -> ImageFont.FreeTypeFont:
    fonts = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / "DejaVuSans-Bold.ttf"), size * SCALE)


def _gradient(size: tuple[int, int], stops: list[tuple[float, Colour]]) -> Image.Image:
    """A vertical gradient through colours at heights from 0 (top) to 1."""
    width, height = size
    rows = np.linspace(0, 1, height)
    heights, colours = zip(*stops, strict=True)
    bands = np.stack([np.interp(rows, heights, channel) for channel in zip(*colours, strict=True)], -1)
    return Image.fromarray(np.repeat(bands[:, None], width, 1).round().astype(np.uint8))


def _shrunk(image: Image.Image) -> Image.Image:
    return image.resize((image.width // SCALE, image.height // SCALE), Image.Resampling.LANCZOS)


def _glow(image: Image.Image, centre: tuple[int, int], radius: int, colour: Colour, strength: int) -> None:
    mask = Image.new("L", image.size)
    x, y = centre
    ImageDraw.Draw(mask).ellipse((x - radius, y - radius, x + radius, y + radius), fill=strength)
    image.paste(colour, mask=mask.filter(ImageFilter.GaussianBlur(radius / 2)))


def beach() -> Image.Image:
    """The sun sets over the sea; a palm tree on the sand."""
    sky = [(0.0, (38, 40, 96)), (0.3, (196, 84, 100)), (0.5, (255, 176, 84)), (0.56, (255, 214, 130))]
    sea = [(0.5601, (214, 128, 90)), (0.76, (44, 62, 110))]
    image = _gradient((1280, 960), [*sky, *sea, (0.7601, (222, 184, 130)), (1.0, (176, 132, 88))])
    _glow(image, (760, 500), 220, (255, 220, 140), 150)
    draw = ImageDraw.Draw(image)
    draw.pieslice((670, 448, 850, 628), 180, 360, fill=(255, 244, 190))
    rng = np.random.default_rng(3)
    for _ in range(260):  # the sun's path on the water
        y = int(rng.integers(545, 725))
        spread = 30 + (y - 540) // 2
        x = int(760 + rng.normal(0, spread))
        draw.line((x, y, x + int(rng.integers(16, 60)), y), fill=(255, 210, 130), width=3)
    for _ in range(160):
        x, y = int(rng.integers(0, 1280)), int(rng.integers(560, 725))
        draw.line((x, y, x + int(rng.integers(20, 70)), y), fill=(90, 80, 116), width=2)
    foam = [(x, 730 + 9 * np.sin(x / 70) + 5 * np.sin(x / 23)) for x in range(0, 1281, 8)]
    draw.line(foam, fill=(250, 240, 226), width=9)
    _palm(draw)
    _sailing_boat(draw, 420, 560)
    return _shrunk(image)


def _palm(draw: ImageDraw.ImageDraw) -> None:
    dark = (34, 28, 34)
    heights = np.linspace(0, 1, 40)
    xs, ys = 1080 - 90 * heights + 70 * heights**2, 880 - 560 * heights
    for x, y, part in zip(xs, ys, heights, strict=True):
        width = 20 - 9 * part
        draw.ellipse((x - width, y - 14, x + width, y + 14), fill=dark)
    top = np.array([xs[-1], ys[-1]])
    for angle in (-200, -165, -125, -60, -20, 15, 40, -95):
        reach = np.linspace(0, 1, 30)
        direction = np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])
        spine = top + reach[:, None] * 240 * direction + np.stack([0 * reach, 150 * reach**2], -1)
        draw.line([tuple(p) for p in spine], fill=dark, width=7)
        for point, part in zip(spine[3:], reach[3:], strict=True):
            leaf = 58 * (1 - part) + 12
            draw.line((*point, point[0] - leaf * 0.35, point[1] + leaf), fill=dark, width=6)
            draw.line((*point, point[0] + leaf * 0.35, point[1] + leaf), fill=dark, width=6)
    for x, y in ((-14, 10), (12, 14), (0, 26)):
        draw.ellipse((top[0] + x - 15, top[1] + y - 15, top[0] + x + 15, top[1] + y + 15), fill=(60, 40, 30))


def _sailing_boat(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    draw.polygon([(x - 60, y), (x + 60, y), (x + 38, y + 24), (x - 42, y + 24)], fill=(60, 34, 40))
    draw.line((x, y, x, y - 110), fill=(60, 34, 40), width=5)
    draw.polygon([(x + 6, y - 108), (x + 6, y - 8), (x + 58, y - 8)], fill=(250, 236, 214))
    draw.polygon([(x - 6, y - 92), (x - 6, y - 8), (x - 44, y - 8)], fill=(236, 210, 186))


def shapes() -> Image.Image:
    """A still life on a table: a red ball, a blue cube, a green cone and a yellow cylinder."""
    image = _gradient(
        (1280, 960), [(0, (236, 230, 220)), (0.55, (214, 206, 194)), (0.551, (150, 104, 66)), (1, (120, 80, 48))]
    )
    for x, y, wide in ((250, 800, 170), (560, 820, 180), (830, 800, 150), (1080, 800, 130)):
        mask = Image.new("L", image.size)
        ImageDraw.Draw(mask).ellipse((x - wide, y - 34, x + wide + 60, y + 34), fill=150)
        image.paste((50, 30, 16), mask=mask.filter(ImageFilter.GaussianBlur(18)))
    _ball(image, (240, 660), 150, np.array([206.0, 30, 36]))
    draw = ImageDraw.Draw(image)
    _cube(draw, 430, 560, 230)
    _cone(image, 840, 800, 130, 420)
    _cylinder(image, 1090, 480, 105, 310)
    return _shrunk(image)


def _ball(image: Image.Image, centre: tuple[int, int], radius: int, colour: np.ndarray) -> None:
    y, x = np.mgrid[-radius:radius, -radius:radius] / radius
    inside = x**2 + y**2 <= 1
    normal = np.stack([x, y, np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))], -1)
    light = np.array([-0.5, -0.6, 0.62])
    bright = np.clip(normal @ light, 0, 1)
    shaded = colour * (0.3 + 0.75 * bright[..., None]) + 190 * bright[..., None] ** 40
    patch = Image.fromarray(np.clip(shaded, 0, 255).astype(np.uint8))
    corner = (centre[0] - radius, centre[1] - radius)
    image.paste(patch, corner, Image.fromarray((inside * 255).astype(np.uint8)))


def _cube(draw: ImageDraw.ImageDraw, x: int, y: int, side: int) -> None:
    slant = side // 3
    draw.polygon([(x, y), (x + side, y), (x + side, y + side), (x, y + side)], fill=(36, 84, 190))
    draw.polygon([(x, y), (x + slant, y - slant), (x + side + slant, y - slant), (x + side, y)], fill=(96, 146, 236))
    draw.polygon(
        [(x + side, y), (x + side + slant, y - slant), (x + side + slant, y + side - slant), (x + side, y + side)],
        fill=(20, 48, 120),
    )


def _cone(image: Image.Image, x: int, foot: int, radius: int, height: int) -> None:
    draw = ImageDraw.Draw(image)
    for step in range(-radius, radius + 1):
        bright = 0.45 + 0.55 * np.cos((step / radius + 0.35) * 1.5)
        colour = tuple(int(c * bright) for c in (60, 180, 76))
        edge = foot + 34 * np.sqrt(1 - (step / radius) ** 2)
        draw.line((x, foot - height, x + step, edge), fill=colour, width=4)


def _cylinder(image: Image.Image, x: int, top: int, radius: int, height: int) -> None:
    draw = ImageDraw.Draw(image)
    for step in range(-radius, radius + 1):
        bright = 0.5 + 0.5 * np.cos((step / radius + 0.35) * 1.4)
        curve = 30 * np.sqrt(1 - (step / radius) ** 2)
        colour = tuple(int(c * bright) for c in (246, 200, 40))
        draw.line((x + step, top, x + step, top + height + curve), fill=colour, width=2)
    draw.ellipse((x - radius, top - 30, x + radius, top + 30), fill=(255, 226, 110))


def sign() -> Image.Image:
    """A street corner: a red stop sign and a green name board on one pole."""
    image = _gradient((1000, 1280), [(0, (92, 158, 224)), (0.75, (206, 230, 246)), (1.0, (206, 230, 246))])
    draw = ImageDraw.Draw(image)
    for x, y in ((180, 200), (260, 170), (340, 205), (760, 330), (850, 300), (920, 340)):
        draw.ellipse((x - 90, y - 46, x + 90, y + 46), fill=(248, 250, 252))
    for left, width, top, colour in (
        (0, 240, 700, (170, 92, 72)),
        (250, 210, 800, (196, 176, 140)),
        (640, 360, 640, (140, 146, 160)),
    ):
        draw.rectangle((left, top, left + width, 1130), fill=colour)
        for y in range(top + 40, 1060, 90):
            for x in range(left + 30, left + width - 50, 70):
                draw.rectangle((x, y, x + 38, y + 52), fill=(236, 232, 190), outline=(80, 70, 66), width=3)
    draw.rectangle((0, 1130, 1000, 1180), fill=(186, 184, 180))
    draw.rectangle((0, 1180, 1000, 1280), fill=(84, 86, 92))
    draw.rectangle((486, 260, 514, 1150), fill=(128, 132, 138), outline=(90, 94, 100), width=3)
    draw.rounded_rectangle((220, 170, 780, 290), 16, fill=(12, 110, 66), outline="white", width=8)
    draw.text((500, 230), "MAPLE STREET", font=_font(30), fill="white", anchor="mm")
    corners = [(500 + 200 * np.cos(a), 530 + 200 * np.sin(a)) for a in np.radians(np.arange(22.5, 382.5, 45))]
    draw.polygon(corners, fill="white")
    inner = [(500 + 0.94 * (x - 500), 530 + 0.94 * (y - 530)) for x, y in corners]
    draw.polygon(inner, fill=(198, 20, 32))
    draw.text((500, 530), "STOP", font=_font(56), fill="white", anchor="mm")
    return _shrunk(image)


def chart() -> Image.Image:
    """A bar chart with a title, labelled axes and a number above each bar."""
    image = Image.new("RGB", (1280, 960), "white")
    draw = ImageDraw.Draw(image)
    black, grey = (40, 40, 44), (214, 216, 220)
    draw.text((640, 70), "Umbrellas sold per season", font=_font(26), fill=black, anchor="mm")
    for value in range(0, 101, 20):
        y = 820 - value * 6.4
        draw.line((160, y, 1220, y), fill=grey if value else black, width=3)
        draw.text((140, y), str(value), font=_font(16), fill=black, anchor="rm")
    bars = (
        ("Spring", 62, (88, 168, 92)),
        ("Summer", 24, (240, 178, 60)),
        ("Autumn", 91, (208, 92, 60)),
        ("Winter", 75, (72, 120, 190)),
    )
    for place, (name, value, colour) in enumerate(bars):
        x = 220 + place * 255
        draw.rectangle((x, 820 - value * 6.4, x + 170, 818), fill=colour)
        draw.text((x + 85, 795 - value * 6.4), str(value), font=_font(18), fill=black, anchor="mm")
        draw.text((x + 85, 860), name, font=_font(18), fill=black, anchor="mm")
    return _shrunk(image)


def house() -> Image.Image:
    """A small house in the snow at night, a lit window, a snowman and a full moon."""
    image = _gradient(
        (1280, 960), [(0, (10, 16, 46)), (0.7, (44, 62, 116)), (0.701, (226, 234, 246)), (1, (190, 204, 228))]
    )
    _glow(image, (1050, 170), 130, (250, 246, 214), 120)
    draw = ImageDraw.Draw(image)
    draw.ellipse((985, 105, 1115, 235), fill=(252, 248, 222))
    rng = np.random.default_rng(1)
    for x, height in ((90, 330), (230, 260), (1000, 300), (1180, 370)):
        for layer in range(4):
            top, half = 690 - height + layer * height // 5, 44 + layer * 22
            draw.polygon([(x, top), (x - half, top + height // 2), (x + half, top + height // 2)], fill=(18, 58, 50))
        draw.polygon([(x, 690 - height), (x - 20, 736 - height), (x + 20, 736 - height)], fill="white")
    draw.rectangle((400, 470, 800, 730), fill=(126, 74, 50))
    for y in range(490, 730, 26):
        draw.line((400, y, 800, y), fill=(104, 58, 38), width=3)
    draw.rectangle((680, 300, 740, 420), fill=(96, 50, 44))
    draw.polygon([(350, 480), (600, 290), (850, 480)], fill=(240, 246, 252))
    draw.polygon([(386, 484), (600, 322), (814, 484)], fill=(88, 42, 40))
    draw.rectangle((560, 570, 650, 730), fill=(66, 34, 26))
    draw.ellipse((628, 645, 640, 657), fill=(230, 190, 90))
    for x in (440, 690):
        draw.rectangle((x, 540, x + 84, 630), fill=(255, 214, 110), outline=(60, 34, 26), width=7)
        draw.line((x + 42, 540, x + 42, 630), fill=(60, 34, 26), width=5)
        draw.line((x, 585, x + 84, 585), fill=(60, 34, 26), width=5)
    _snowman(draw, 930, 800)
    for _ in range(300):
        x, y, r = int(rng.integers(0, 1280)), int(rng.integers(0, 960)), int(rng.integers(2, 6))
        draw.ellipse((x - r, y - r, x + r, y + r), fill=(244, 248, 255))
    return _shrunk(image)


def _snowman(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    for centre, radius in ((y, 92), (y - 130, 66), (y - 226, 46)):
        box = (x - radius, centre - radius, x + radius, centre + radius)
        draw.ellipse(box, fill=(250, 252, 255), outline=(164, 180, 210), width=4)
    for dx in (-16, 16):
        draw.ellipse((x + dx - 6, y - 242, x + dx + 6, y - 230), fill=(20, 20, 24))
    draw.polygon([(x, y - 224), (x, y - 208), (x - 52, y - 212)], fill=(236, 122, 30))
    draw.rectangle((x - 56, y - 276, x + 56, y - 264), fill=(24, 24, 30))
    draw.rectangle((x - 36, y - 340, x + 36, y - 268), fill=(24, 24, 30))
    draw.line((x - 50, y - 182, x + 50, y - 182), fill=(200, 30, 44), width=18)
    draw.line((x - 60, y - 140, x - 130, y - 190), fill=(84, 54, 36), width=8)
    draw.line((x + 60, y - 140, x + 130, y - 190), fill=(84, 54, 36), width=8)


DRAWINGS = {
    "beach.jpg": beach,
    "shapes.png": shapes,
    "sign.jpg": sign,
    "chart.png": chart,
    "house.jpg": house,
}


def main() -> None:
    """Write every drawing into the folder given, or beside this file."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in DRAWINGS.items():
        options = {"quality": 90} if name.endswith(".jpg") else {"optimize": True}
        draw().save(folder / name, **options)


if __name__ == "__main__":
    main()
