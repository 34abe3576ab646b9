"""What people call the tower's classes: an espresso is a cup of coffee, a missile a rocket, a beagle a dog.

Indices into `classes.json` (ImageNet's order). Training names a pasted or recognised class now by its own name, now by
the everyday one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvcli.builtin import prompts

EVERYDAY: dict[str, tuple[int | range, ...]] = {
    "fish": (0, 1, range(389, 398)),
    "shark": (range(2, 5),),
    "bird": (range(7, 25), range(80, 101), range(127, 147)),
    "frog": (range(30, 33),),
    "turtle": (range(33, 38),),
    "lizard": (range(38, 49),),
    "crocodile": (49, 50),
    "snake": (range(52, 69),),
    "spider": (range(72, 78),),
    "elephant": (101, 385, 386),
    "crab": (range(118, 122),),
    "lobster": (122, 123),
    "whale": (147, 148),
    "dog": (range(151, 269),),
    "wolf": (range(269, 273),),
    "fox": (range(277, 281),),
    "cat": (range(281, 286),),
    "leopard": (288, 289, 290),
    "bear": (range(294, 298),),
    "beetle": (range(300, 308),),
    "butterfly": (range(321, 327),),
    "rabbit": (range(330, 333),),
    "horse": (339,),
    "pig": (341, 342),
    "cow": (345, 346),
    "sheep": (348, 349),
    "goat": (350,),
    "camel": (354,),
    "ape": (range(365, 369),),
    "monkey": (range(369, 383),),
    "panda": (387, 388),
    "airplane": (404, 895),
    "car": (436, 511, 627, 661, 751, 817),
    "taxi": (468,),
    "van": (656,),
    "bus": (654, 779, 874),
    "fire truck": (555,),
    "truck": (569, 717, 864, 867),
    "bicycle": (444, 671),
    "scooter": (665, 670),
    "train": (466, 547, 820),
    "boat": (472, 484, 576, 625, 814, 871, 914),
    "ship": (510, 628, 780),
    "rocket": (657, 744, 812),
    "cup of coffee": (967,),
    "mug": (504,),
    "keyboard": (508,),
    "computer": (527, 620, 681),
    "clock": (409, 530, 892),
    "watch": (531,),
    "guitar": (402, 546),
    "piano": (579, 881),
    "flower": (985, 986),
    "apple": (948,),
    "burger": (933,),
    "ball": (430, 574, 722, 768, 805, 852, 890),
    "chair": (423, 559, 765),
    "couch": (831,),
    "phone": (487, 528, 707),
    "camera": (732, 759),
    "bottle": (440, 720, 737, 898, 899, 907),
    "hat": (439, 515, 808),
    "shoe": (514, 630, 770),
    "mountain": (970, 979, 980),
    "beach": (978,),
    "bridge": (718, 821, 839, 888),
    "mushroom": (947, 991, 992, 993, 994, 995, 996, 997),
}

OF_CLASS: dict[int, str] = {
    index: name
    for name, places in EVERYDAY.items()
    for place in places
    for index in (place if isinstance(place, range) else (place,))
}
"""Class index -> its everyday name, for the classes that have one."""


def called(label: int, classes: Sequence[str], rng: random.Random) -> str:
    """A class with its article: by its name in `classes`, or as often by its everyday one where it has one."""
    everyday = OF_CLASS.get(label)
    return prompts.article(everyday if everyday and rng.random() < 0.5 else classes[label])
