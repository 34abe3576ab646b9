r"""File names as text that is always valid UTF-8, and back again. Knows nothing of files.

On most systems a file name is bytes, and Python carries those that are no UTF-8 as lone surrogates, which
no JSON reader or terminal takes. Shown, such a byte is `\xNN`. A name that already looks so gets its
backslashes doubled, so that every name has a text of its own and `restore(display(name)) == name`.
"""

import re

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|ud[89a-f][0-9a-f]{2})")
_ANY_ESCAPE = re.compile(r"\\(?:\\|x([0-9a-f]{2})|u(d[89a-f][0-9a-f]{2}))")


def display(name: str) -> str:
    """The text of a file name for records and people: valid UTF-8, different for different names."""
    if not _SURROGATE.search(name) and not _ESCAPE.search(name):
        return name
    return _SURROGATE.sub(_escaped, name.replace("\\", "\\\\"))


def restore(text: str) -> str:
    """The file name of a text that `display` gave."""
    return _ANY_ESCAPE.sub(_unescaped, text) if _ESCAPE.search(text) else text


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _unescaped(match: re.Match[str]) -> str:
    byte, code = match[1], match[2]
    if byte:
        return chr(0xDC00 + int(byte, 16))
    return chr(int(code, 16)) if code else "\\"
