"""Where a model looks: its attention in a run with the full cache, and what the same answer gives an empty picture.

Much attention goes to places, not to what is there: to the first tokens, to the nearest ones. The same answer is
therefore also fed with evenly grey pictures in the place of the real ones; what a part of the picture gets beyond that
is owed to what it shows. (The idea of relative attention is that of Zhang et al., MLLMs Know Where to Look, ICLR 2025,
arXiv 2502.17422, who change the question instead.)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from kvcli.engine.decoding import Decoding
from kvcli.engine.forcing import force
from kvcli.engine.recording import Trace, record
from kvcli.engine.session import Outcome, Prepared, Session
from kvcli.engine.vision import boxes
from kvcli.policies.full import Full

GREY = (128, 128, 128)


@dataclass(frozen=True)
class Look:
    """boxes: for each picture what its visual tokens see [n, 4], or None when that is not known. trace: the run with
    the full cache; blank: the same answer over grey pictures."""

    outcome: Outcome
    trace: Trace
    blank: Trace
    boxes: list[Tensor] | None


def look(session: Session, prepared: Prepared, decoding: Decoding) -> Look:
    """Answer a request with the full cache and record it, then feed the answer with the pictures blanked."""
    watched, idle = record(Full()), record(Full())
    outcome = session.run([prepared], watched, decoding)[0]
    request = prepared.request
    grey = tuple(Image.new("RGB", picture.size, GREY) for picture in request.images)
    force(session, [session.prepare(dataclasses.replace(request, images=grey))], idle, [outcome.tokens], _ignore)
    found = boxes(session.model, session.processor, request.images, prepared.visual)
    inside = found is not None and sum(map(len, found)) == prepared.visual
    return Look(outcome, watched.trace(), idle.trace(), found if inside else None)


def _ignore(step: int, logits: torch.Tensor) -> None:
    """Only the attention is wanted."""
