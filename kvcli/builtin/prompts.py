"""The words around a picture: the chat format of the built-in model and the questions that it was trained on."""

from __future__ import annotations

OPEN, CLOSE, IMAGE = "<|im_start|>", "<|im_end|>", "<image>"

CAPTION = (
    "Describe the image.",
    "Write a caption for this picture.",
    "What is in the picture?",
    "Describe this photo.",
)
DETAIL = ("Describe the image in detail.", "Describe this photo in detail.", "What can you see? Give all details.")
STORY = (
    "Write a story about this picture.",
    "Tell a story about the image.",
    "Write a short story about this photo.",
    "Write a story about this picture. About 150 words.",
)
LABEL = ("What is the main object?", "What is this?", "Name one thing in the picture.")


def before_image() -> str:
    return f"{OPEN}user\n"


def after_image(question: str) -> str:
    return f"\n{question}{CLOSE}\n{OPEN}assistant\n"


def chat(question: str) -> str:
    """A turn without a picture, as the language model knows it."""
    return f"{OPEN}user\n{question}{CLOSE}\n{OPEN}assistant\n"


def tidy(caption: str) -> str:
    """A human caption as a sentence: capital first, no space before the stop, one stop at the end."""
    text = " ".join(caption.split()).replace(" .", ".").replace(" ,", ",").rstrip(". ")
    return text[:1].upper() + text[1:] + "."


def article(name: str) -> str:
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


# pictures first or in between, each followed by a new line; no system turn unless there is one
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
