"""kvpress's side of the comparison: a script for an environment of its own, which has no kvcli in it.

Reads one JSON request a line on stdin and answers each with one line on stdout: versions for `{}`; for the name of a
press, a batch of token ids and a budget, the seconds of its prefill and of each decode step. The model stays loaded in
between, so that the other side can take turns with it. Usage: peer_child.py FOLDER DTYPE THREADS.
"""

import itertools
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

WARM_UP = 1
"""Steps that are not counted."""


def load(folder: str, dtype: str, press: str) -> Any:
    """The model, with the attention that the press needs."""
    eager = press == "ObservedAttentionPress"
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager" if eager else "sdpa"
    ).eval()


def run(model: Any, press: Any, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """One prompt and `steps` greedy steps, as kvpress's own pipeline does them."""
    cache, length = DynamicCache(), ids.shape[1]
    started = time.perf_counter()
    with torch.inference_mode():
        with press(model):
            out = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        times = [time.perf_counter()]
        for step in range(steps + WARM_UP):
            positions = torch.full((1, 1), length + step)
            out = model(input_ids=token, past_key_values=cache, position_ids=positions, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            times.append(time.perf_counter())
    seconds = [b - a for a, b in itertools.pairwise(times)]
    held = cache.layers[0].keys.shape[2] - steps - WARM_UP
    return {"prefill": times[0] - started, "steps": seconds[WARM_UP:], "kept": held}


def main() -> None:
    folder, dtype, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    models: dict[bool, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            answer: dict[str, Any] = {name: version(name) for name in ("kvpress", "transformers", "torch")}
        else:
            name = request["press"]
            observed = name == "ObservedAttentionPress"
            if observed not in models:
                models[observed] = load(folder, dtype, name)
            press = getattr(kvpress, name)(compression_ratio=1 - request["budget"], **request["options"])
            answer = run(models[observed], press, torch.tensor(request["ids"]), request["steps"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
