"""torch, imported when it is first used, so that listing the policies stays instant.

Policies write `from kvcli.policies.lazy import torch` and use it like the module itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Lazy:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Lazy()

__all__ = ["torch"]
