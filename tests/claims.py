"""The order of claims that the reference server has shown (core 3.4): pushes by name, and how they come out."""

from __future__ import annotations

from typing import Any

PUSHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1", {}),
    ("2", {}),
    ("L1", {"lifo": True}),
    ("3", {}),
    ("L2", {"lifo": True}),
    ("P5", {"priority": 5}),
    ("P5b", {"priority": 5}),
    ("P-1", {"priority": -1}),
    ("P5L", {"priority": 5, "lifo": True}),
)
CLAIMS = ["P5L", "P5", "P5b", "L2", "L1", "1", "2", "3", "P-1"]
